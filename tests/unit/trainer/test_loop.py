"""From taken groups to rows, advantages, metrics and the account of what was trained."""

from __future__ import annotations

import json

import numpy as np
import pytest

from common.db.steps import ScoredGroup
from common.episode import ScoredEpisode, TurnTokens
from trainer.loop import account, prepare
from trainer.samples import sample_digest


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


def test_failures_of_infrastructure_enter_neither_rows_nor_baseline() -> None:
    samples, advantages, metrics = prepare(GROUPS, version=5)
    assert [sample.episode_id for sample in samples] == [1, 2, 4, 5]
    assert dict(advantages.by_episode) == pytest.approx({1: 1.0, 2: -1.0, 4: 0.0, 5: 0.0}, abs=1e-3)
    assert metrics["num_episodes"] == 4


def test_metrics_of_what_was_taken() -> None:
    _, _, metrics = prepare(GROUPS, version=5)
    assert metrics == pytest.approx(
        {
            "reward_mean": 0.75,
            "reward_std": np.sqrt(3) / 4,
            "num_episodes": 4,
            "num_tokens": 5,
            "zero_variance_groups": 1,
            "lag_mean": 0.4,
            "lag_max": 1,
        }
    )
    json.dumps(metrics, allow_nan=False)


def test_every_row_is_accounted_for_with_its_digest() -> None:
    samples, advantages, _ = prepare(GROUPS, version=5)
    trained = account(samples, advantages)
    assert [(entry.episode_id, entry.num_tokens) for entry in trained] == [(1, 3), (2, 1), (4, 1), (5, 0)]
    assert [entry.digest for entry in trained] == [sample_digest(sample) for sample in samples]
    assert trained[0].advantage == advantages.by_episode[1]
