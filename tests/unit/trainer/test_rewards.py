"""Penalties that are taken off rewards, and who stays out of the loss."""

from __future__ import annotations

import numpy as np
import pytest

from common.config_train import TrainConfig
from common.episode import ScoredEpisode, TurnTokens
from trainer.advantages import step_advantages
from trainer.rewards import group_rewards, is_trained, overlong_penalty


def episode(
    episode_id: int, *, reward: float = 1.0, num_tokens: tuple[int, ...] = (3,), outcome: str = "finished"
) -> ScoredEpisode:
    turns = tuple(
        TurnTokens(
            suffix_ids=np.array([1], np.int32),
            sampled_ids=np.full(count, 7, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            versions=np.zeros(count, np.int32),
        )
        for count in num_tokens
    )
    return ScoredEpisode(episode_id=episode_id, group_id=1, outcome=outcome, reward=reward, turns=turns)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (60, 0), (61, 0.025), (80, 0.5), (99, 0.975), (100, 1), (5000, 1)]
)
def test_overlong_penalty_rises_over_the_buffer(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, limit=100, buffer=40) == pytest.approx(penalty)


def test_length_is_that_of_all_sampled_tokens_of_the_episode() -> None:
    train = TrainConfig(overlong_tokens=100, overlong_buffer=40)
    rewards = group_rewards(
        [episode(1, num_tokens=(50, 30)), episode(2, reward=0.0, num_tokens=(120,)), episode(3, num_tokens=(60,))],
        group_id=1,
        train=train,
        kl_by_episode={},
    )
    assert rewards.raw == {1: 1.0, 2: 0.0, 3: 1.0}
    assert rewards.shaped == pytest.approx({1: 0.5, 2: -1.0, 3: 1.0})


def test_group_of_right_answers_is_filtered_by_its_raw_rewards() -> None:
    train = TrainConfig(overlong_tokens=100, overlong_buffer=40)
    rewards = group_rewards(
        [episode(1, num_tokens=(70,)), episode(2, num_tokens=(95,))], group_id=1, train=train, kl_by_episode={}
    )
    assert rewards.shaped[1] > rewards.shaped[2]
    advantages = step_advantages([rewards], train=train)
    assert (dict(advantages.by_episode), advantages.zero_variance_groups) == ({1: 0.0, 2: 0.0}, 1)


def test_distance_to_the_start_is_taken_off_by_its_coefficient() -> None:
    train = TrainConfig(kl="reward", kl_coefficient=0.1, kl_estimator="k1")
    rewards = group_rewards(
        [episode(1), episode(2, reward=0.0), episode(3, num_tokens=())],
        group_id=1,
        train=train,
        kl_by_episode={1: 2.0, 2: -0.5},
    )
    assert rewards.shaped == pytest.approx({1: 0.8, 2: 0.05, 3: 1.0})


@pytest.mark.parametrize(
    ("outcome", "trained"),
    [
        ("finished", True),
        ("turn_limit", True),
        ("agent_timeout", True),
        ("token_limit", False),
        ("context_limit", False),
    ],
)
def test_cut_off_is_told_by_the_outcome_not_by_the_last_token(outcome: str, trained: bool) -> None:
    # All end with the same id: which token closes a turn is the model's affair.
    assert is_trained(episode(1, outcome=outcome), train=TrainConfig(truncated="mask")) is trained
    assert is_trained(episode(1, outcome=outcome), train=TrainConfig())
