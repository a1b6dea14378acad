"""The engine of the one-machine stack: which one, and how it is started."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from deploy.ports import http_ok
from deploy.process import ProcessSpec
from deploy.vllm import DEFAULT_PYTHON, LoraPlan, VllmPlan, find_build, vllm_spec

MODEL_NAME = "policy"
"""The name under which every engine of ours serves its model."""
SMALL_START_TIMEOUT_S = 120.0


class EngineKind(StrEnum):
    """What samples the episodes."""

    SMALL = "small"
    """The small CPU engine that comes along: up in seconds, for tiny models."""
    VLLM = "vllm"
    """Real vLLM, in the environment that `make engine` makes."""


def check_engine_installed(kind: EngineKind) -> None:
    """Raise SetupError where it is not, before anything is started."""
    if kind is EngineKind.VLLM:
        find_build(DEFAULT_PYTHON)


def engine_spec(
    kind: EngineKind, *, model: Path, port: int, env: dict[str, str], lora: LoraPlan | None = None
) -> ProcessSpec:
    """The process; `env` is for our own program only, which takes adapters of any rank without being told."""
    if kind is EngineKind.VLLM:
        return vllm_spec(VllmPlan(model=model, served_name=MODEL_NAME, port=port, lora=lora))
    return ProcessSpec(
        name="engine",
        argv=(
            *(sys.executable, "-m", "workers.engine", "--model", str(model)),
            *("--port", str(port), "--served-model-name", MODEL_NAME),
        ),
        env=env,
        ready=http_ok(port, "/health"),
        ready_timeout_s=SMALL_START_TIMEOUT_S,
    )
