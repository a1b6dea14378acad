"""The demonstration's run: a tiny policy that learns a task with a tool within minutes, on two CPU cores."""

from __future__ import annotations

from enum import StrEnum

from common.config import TINY_MODELS, RunConfig
from common.config_train import TrainConfig


class DemoHandler(StrEnum):
    """Task kinds for which a tiny start model is at hand."""

    CALCULATOR = "calculator"
    """Sums over two or three calls of a calculator."""
    SHELL = "shell"
    """Finding a code in a folder's files with ls and cat."""


def demo_config(*, handler: DemoHandler, seed: int, num_versions: int, max_staleness: int) -> RunConfig:
    """The run; its name is the stem of the runs that repeat it."""
    return RunConfig(
        name=f"demo-{handler}-seed{seed}",
        handler=handler,
        model=TINY_MODELS / f"tiny-{handler}",
        seed=seed,
        train=TrainConfig(num_versions=num_versions, max_staleness=max_staleness),
    )
