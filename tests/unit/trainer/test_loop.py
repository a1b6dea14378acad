"""From taken groups to rows, advantages, metrics and the account of what was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from common.config_train import TrainConfig
from common.db.steps import ScoredGroup, Step
from common.episode import ScoredEpisode, TurnTokens
from trainer.advantages import Advantages
from trainer.loop import account, prepare, rows_of
from trainer.samples import Sample, samples_digest
from trainer.step_metrics import lag_metrics, warn_of_silence


def episode(episode_id: int, *, group_id: int, reward: float, versions: list[int], outcome: str) -> ScoredEpisode:
    count = len(versions)
    turn = TurnTokens(
        suffix_ids=np.array([1], np.int32),
        sampled_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        versions=np.array(versions, np.int32),
    )
    turns = (turn,) if count else ()
    return ScoredEpisode(episode_id=episode_id, group_id=group_id, outcome=outcome, reward=reward, turns=turns)


GROUPS = (
    ScoredGroup(
        group_id=1,
        episodes=(
            episode(1, group_id=1, reward=1.0, versions=[4, 4, 5], outcome="finished"),
            episode(2, group_id=1, reward=0.0, versions=[5], outcome="format_error"),
            episode(3, group_id=1, reward=0.0, versions=[3], outcome="sandbox_failed"),
        ),
    ),
    ScoredGroup(
        group_id=2,
        episodes=(
            episode(4, group_id=2, reward=1.0, versions=[5], outcome="turn_limit"),
            episode(5, group_id=2, reward=1.0, versions=[], outcome="context_limit"),
        ),
    ),
)

STEP = Step(id=3, run_id=7, version_in=5)


def prepared(
    distances: dict[int, float] | None = None, /, **train: object
) -> tuple[list[Sample], Advantages, dict[str, float]]:
    """GROUPS before the step of version 5; `distances` is what the policy says of the distance to the start weights."""
    asked: list[int] = []

    def reference_kl(samples: Sequence[Sample]) -> dict[int, float]:
        asked.extend(sample.episode_id for sample in samples)
        return distances or {}

    samples = rows_of(GROUPS)
    result = prepare(GROUPS, samples, version=5, train=TrainConfig.model_validate(train), reference_kl=reference_kl)
    assert asked == ([] if distances is None else [1, 2, 4, 5])
    return samples, *result


def test_failures_of_infrastructure_enter_neither_rows_nor_baseline() -> None:
    samples, advantages, metrics = prepared()
    assert [sample.episode_id for sample in samples] == [1, 2, 4, 5]
    assert dict(advantages.by_episode) == pytest.approx({1: 1.0, 2: -1.0, 4: 0.0, 5: 0.0}, abs=1e-3)
    assert metrics["num_episodes"] == 4


def test_metrics_of_what_was_taken() -> None:
    _, _, metrics = prepared(max_staleness=2)
    assert metrics == pytest.approx(
        {
            "reward_mean": 0.75,
            "reward_std": np.sqrt(3) / 4,
            "shaped_reward_mean": 0.75,
            "num_groups": 2,
            "num_episodes": 4,
            "num_rows": 4,
            "num_tokens": 5,
            "zero_variance_groups": 1,
            "singleton_groups": 0,
            "left_out_episodes": 0,
            "lag_mean": 0.4,
            "lag_max": 1,
            "lag_0_fraction": 0.6,
            "lag_1_fraction": 0.4,
            "lag_2_fraction": 0,
        }
    )
    json.dumps(metrics, allow_nan=False)


def test_every_row_with_tokens_is_accounted_for_with_its_digest() -> None:
    samples, advantages, _ = prepared()
    trained = account(samples, advantages)
    assert [(entry.episode_id, entry.num_tokens) for entry in trained] == [(1, 3), (2, 1), (4, 1)]
    assert [entry.digest for entry in trained] == [samples_digest([sample]) for sample in samples if sample.num_tokens]
    assert trained[0].advantage == advantages.by_episode[1]


def test_penalties_shape_what_is_trained_and_not_what_is_reported() -> None:
    _, advantages, metrics = prepared(
        {1: 2.0, 2: 1.0, 4: 9.0}, kl="reward", kl_coefficient=0.1, kl_estimator="k1", advantage="dr_grpo"
    )
    # 1.0 - 0.2 and 0.0 - 0.1; the second group's raw rewards are equal
    assert dict(advantages.by_episode) == pytest.approx({1: 0.45, 2: -0.45, 4: 0.0, 5: 0.0})
    assert metrics["reward_mean"] == 0.75
    assert metrics["shaped_reward_mean"] == pytest.approx((0.8 - 0.1 + 0.1 + 1.0) / 4)


def test_episodes_that_were_cut_off_can_be_left_out_of_the_loss() -> None:
    samples, advantages, metrics = prepared(truncated="mask")
    assert advantages.left_out == {5}
    assert metrics["left_out_episodes"] == 1
    assert [entry.episode_id for entry in account(samples, advantages)] == [1, 2, 4]


def test_lags_are_those_of_tokens_up_to_the_bound() -> None:
    assert lag_metrics(np.array([0, 2, 2, 1, 2]), max_staleness=3) == pytest.approx(
        {
            "lag_mean": 1.4,
            "lag_max": 2,
            "lag_0_fraction": 0.2,
            "lag_1_fraction": 0.2,
            "lag_2_fraction": 0.6,
            "lag_3_fraction": 0,
        }
    )


def test_a_step_without_a_sampled_token_has_lags_of_0_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    silent = ScoredGroup(
        group_id=9,
        episodes=tuple(
            episode(number, group_id=9, reward=float(number), versions=[], outcome="context_limit") for number in (0, 1)
        ),
    )
    samples = rows_of((silent,))
    advantages, metrics = prepare(
        (silent,), samples, version=5, train=TrainConfig(), reference_kl=lambda samples: pytest.fail("not asked")
    )
    assert account(samples, advantages) == []
    assert (metrics["reward_mean"], metrics["num_episodes"], metrics["num_tokens"]) == (0.5, 2, 0)
    assert {name: value for name, value in metrics.items() if name.startswith("lag_")} == dict.fromkeys(
        ["lag_mean", "lag_max", "lag_0_fraction", "lag_1_fraction"], 0.0
    )
    json.dumps(metrics, allow_nan=False)
    warn_of_silence(STEP, metrics)
    assert caplog.messages == [
        "not one sampled token in the groups of a step, so there is nothing to learn run=7 step=3 version=5 groups=1 "
        "zero_variance=0 episodes=2 left_out_as_truncated=0"
    ]


def test_the_warning_of_a_step_without_gradient_says_what_took_it(caplog: pytest.LogCaptureFixture) -> None:
    metrics = prepared(truncated="mask")[2]
    warn_of_silence(STEP, metrics)
    warn_of_silence(STEP, metrics | {"left_out_episodes": metrics["num_episodes"]})
    assert caplog.messages == [
        "no episode of a step has an advantage, so there is nothing to learn run=7 step=3 version=5 groups=2 "
        "zero_variance=1 episodes=4 left_out_as_truncated=1",
        "every episode of a step was cut off and is left out (train.truncated), so there is nothing to learn run=7 "
        "step=3 version=5 groups=2 zero_variance=1 episodes=4 left_out_as_truncated=4",
    ]
