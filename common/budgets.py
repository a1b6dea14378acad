"""How long a stage may work on an episode, and so how long a message stays unacknowledged. Queue time is excluded."""

from __future__ import annotations

from collections.abc import Iterable

from common.config import RolloutConfig, RunConfig
from common.episode import Stage
from common.settings import Settings


def budget_s(stage: Stage, rollout: RolloutConfig, given: Settings) -> float:
    """From the claim on; what has not ended then is stopped, and tried again.

    In RUN the agent keeps to its own time by itself, so this is for what does not end though it was cut off.
    """
    if stage is Stage.RUN:
        return rollout.episode_timeout_s + given.engine_wait_s
    return rollout.init_timeout_s if stage is Stage.INIT else rollout.eval_timeout_s


def longest_held_s(stage: Stage, configs: Iterable[RunConfig], given: Settings) -> float:
    """The longest time that one message of the stage may be held for one of these runs; 0.0 for none."""
    return max((budget_s(stage, config.rollout, given) + given.stage_grace_s for config in configs), default=0.0)
