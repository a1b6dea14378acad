"""The engine of the one-machine stack: which one, and how it is started."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path

from common.config import RunConfig
from common.context import SMALL_ENGINE_CONTEXT, needed_context
from common.errors import SetupError
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


def check_small_context(kind: EngineKind, config: RunConfig) -> None:
    """Raise SetupError where the small engine would by itself take a shorter context than the run needs."""
    if kind is not EngineKind.SMALL or config.rollout.max_row_tokens is not None:
        return
    needed = needed_context(config.model, None)
    if needed is not None and needed.num_ids > SMALL_ENGINE_CONTEXT:
        raise SetupError(
            f"run {config.name} needs a context of {needed.num_ids} ids, {needed.why}, and the small engine has one of "
            f"{SMALL_ENGINE_CONTEXT}: set rollout.max_row_tokens, or take another engine"
        )


def engine_spec(
    kind: EngineKind,
    *,
    model: Path,
    port: int,
    env: dict[str, str],
    lora: LoraPlan | None = None,
    max_row_tokens: int | None = None,
) -> ProcessSpec:
    """The process; `env` is for our own program only, which takes adapters of any rank without being told, and a
    longer context than its usual one where it is told of rows that need it."""
    if kind is EngineKind.VLLM:
        return vllm_spec(VllmPlan(model=model, served_name=MODEL_NAME, port=port, lora=lora))
    return ProcessSpec(
        name="engine",
        argv=(
            *(sys.executable, "-m", "workers.engine", "--model", str(model)),
            *("--port", str(port), "--served-model-name", MODEL_NAME),
            *(("--max-model-len", str(max_row_tokens)) if (max_row_tokens or 0) > SMALL_ENGINE_CONTEXT else ()),
        ),
        env=env,
        ready=http_ok(port, "/health"),
        ready_timeout_s=SMALL_START_TIMEOUT_S,
    )
