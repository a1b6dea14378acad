from __future__ import annotations

from pathlib import Path

from common.config import RolloutConfig, RunConfig
from common.episode import Stage
from common.held import longest_held_s
from common.settings import Settings


def config(**rollout: float) -> RunConfig:
    return RunConfig(name="run-a", model=Path("model"), rollout=RolloutConfig.model_validate(rollout))


def test_run_may_hold_a_message_for_its_budget_a_wait_before_each_turn_and_a_last_request() -> None:
    given = Settings(engine_wait_s=90, request_timeout_s=60)
    short, long = config(episode_timeout_s=120, max_turns=4), config(episode_timeout_s=3600, max_turns=1)
    assert longest_held_s(Stage.RUN, [short], given) == 120 + 4 * 90 + 60
    assert longest_held_s(Stage.RUN, [short, long], given) == 3600 + 90 + 60
    assert longest_held_s(Stage.RUN, [], given) == 0
