from __future__ import annotations

from pathlib import Path

from common.budgets import longest_held_s
from common.config import RolloutConfig, RunConfig
from common.episode import Stage
from common.settings import Settings


def config(**rollout: float) -> RunConfig:
    return RunConfig(name="run-a", model=Path("model"), rollout=RolloutConfig.model_validate(rollout))


def test_a_message_is_held_for_the_longest_budget_and_the_grace() -> None:
    given = Settings(engine_wait_s=90, stage_grace_s=5)
    short, long = config(episode_timeout_s=120, init_timeout_s=60), config(episode_timeout_s=3600, eval_timeout_s=900)
    assert longest_held_s(Stage.INIT, [short], given) == 60 + 5
    assert longest_held_s(Stage.RUN, [short], given) == 120 + 90 + 5
    assert longest_held_s(Stage.RUN, [short, long], given) == 3600 + 90 + 5
    assert longest_held_s(Stage.EVAL, [short, long], given) == 900 + 5
    assert longest_held_s(Stage.RUN, [], given) == 0
