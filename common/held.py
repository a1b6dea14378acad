"""How long a message stays unacknowledged at most: as long as its stage works on the episode."""

from __future__ import annotations

from collections.abc import Iterable

from common.config import RunConfig
from common.episode import Stage
from common.settings import Settings


def longest_held_s(stage: Stage, configs: Iterable[RunConfig], given: Settings) -> float:
    """The longest time that one message of the stage may be held; 0.0 = its work has no bound that we know.

    In RUN it is the agent's own time, which the last request may exceed, and a wait for an engine before each turn.
    """
    if stage is not Stage.RUN:
        return 0.0
    return max(
        (
            config.rollout.episode_timeout_s + config.rollout.max_turns * given.engine_wait_s + given.request_timeout_s
            for config in configs
        ),
        default=0.0,
    )
