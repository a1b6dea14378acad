"""Advantages against values computed by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from common.config_train import TrainConfig
from trainer.advantages import (
    Advantages,
    GroupRewards,
    dr_grpo,
    grpo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    step_advantages,
)

OF_A_GROUP = [grpo, dr_grpo, rloo, partial(pass_at_k, k=2)]


def group(group_id: int, raw: dict[int, float], shaped: dict[int, float] | None = None) -> GroupRewards:
    return GroupRewards(group_id=group_id, raw=raw, shaped=raw if shaped is None else shaped)


def step(groups: list[GroupRewards], **train: object) -> Advantages:
    return step_advantages(groups, train=TrainConfig.model_validate(train))


def test_grpo_by_hand() -> None:
    # mean 1/4, population variance (9 + 3) / 4 / 16 = 3/16
    std = math.sqrt(3) / 4
    expected = [0.75 / (std + 1e-4), -0.25 / (std + 1e-4), -0.25 / (std + 1e-4), -0.25 / (std + 1e-4)]
    assert grpo([1.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx(expected, abs=1e-12)


def test_dr_grpo_by_hand() -> None:
    assert dr_grpo([1.0, 0.0, 0.5, 0.5]).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert dr_grpo([10.0, 0.0, 0.0, 0.0]).tolist() == [7.5, -2.5, -2.5, -2.5]


def test_rloo_takes_the_mean_of_the_others_whatever_the_size_of_the_group() -> None:
    # 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2
    assert rloo([3.0, 1.0, 2.0]).tolist() == pytest.approx([1.5, -1.5, 0.0])
    assert rloo([3.0, 1.0]).tolist() == pytest.approx([2.0, -2.0])
    # 6 - (0 * 4) / 4, 0 - 6 / 4
    assert rloo([6.0, 0.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx([6.0, -1.5, -1.5, -1.5, -1.5])


def test_reinforce_plus_plus_by_hand() -> None:
    # mean 2, population std sqrt((1 + 1 + 9 + 9) / 4) = sqrt(5)
    std = math.sqrt(5) + 1e-4
    expected = [-1 / std, 1 / std, 3 / std, -3 / std]
    assert reinforce_plus_plus([1.0, 3.0, 5.0, -1.0]).tolist() == pytest.approx(expected, abs=1e-12)
    assert reinforce_plus_plus([0.3, 0.3]).tolist() == [0.0, 0.0]


def test_reinforce_plus_plus_with_baseline_by_hand() -> None:
    # std sqrt((1 + 1 + 0 + 0) / 4)
    std = math.sqrt(0.5) + 1e-4
    expected = [1 / std, -1 / std, 0, 0]
    assert reinforce_plus_plus_baseline([1.0, -1.0, 0.0, 0.0]).tolist() == pytest.approx(expected, abs=1e-12)
    assert reinforce_plus_plus_baseline([]).tolist() == []


def test_pass_at_k_by_hand() -> None:
    # 2 of 5 solved, k = 3: a team fails in 1 of 10 cases. With a solved one it never fails; with another it does in
    # comb(2, 2) / comb(4, 2) = 1/6 of the cases. Mean 0.9, std sqrt(0.9 * 0.1) = 0.3.
    good, bad = 0.1 / 0.3001, (5 / 6 - 0.9) / 0.3001
    expected = [good, bad, bad, good, bad]
    assert pass_at_k([1.0, 0.0, 0.0, 1.0, 0.0], k=3).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_all_teams_one_by_one(k: int) -> None:
    rewards = [0.3, -1.0, 0.3, 2.5, 0.0, 0.9]
    best = {team: max(rewards[member] for member in team) for team in itertools.combinations(range(6), k)}
    mean, std = np.mean(list(best.values())), np.std(list(best.values()))
    expected = [
        (np.mean([value for team, value in best.items() if member in team]) - mean) / (std + 1e-4)
        for member in range(6)
    ]
    assert pass_at_k(rewards, k=k).tolist() == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_zero_where_teams_do_not_differ() -> None:
    assert pass_at_k([1.0, 0.0], k=2).tolist() == [0.0, 0.0]
    assert pass_at_k([1.0, 1.0, 1.0, 0.0], k=2).tolist() == [0.0] * 4


@pytest.mark.parametrize("advantages", OF_A_GROUP)
def test_better_than_the_siblings_is_positive_and_the_sum_is_zero(
    advantages: Callable[[Sequence[float]], np.ndarray],
) -> None:
    values = advantages([0.2, 0.9, 0.4])
    assert values[1] > 0 > values[2] >= values[0]
    assert values.sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("advantages", OF_A_GROUP)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 8, [1.0], [0.0, 0.0], []])
def test_group_without_variance_gives_exact_zeros(
    advantages: Callable[[Sequence[float]], np.ndarray], rewards: list[float]
) -> None:
    assert advantages(rewards).tolist() == [0.0] * len(rewards)


def test_groups_have_baselines_of_their_own() -> None:
    advantages = step(
        [group(1, {1: 1.0, 2: 0.0}), group(2, {3: 11.0, 4: 10.0}), group(3, {5: 1.0, 6: 1.0}), group(4, {7: 0.0})]
    )
    one = 0.5 / (0.5 + 1e-4)
    assert advantages.by_episode == pytest.approx({1: one, 2: -one, 3: one, 4: -one, 5: 0, 6: 0, 7: 0})
    assert advantages.zero_variance_groups == 2


@pytest.mark.parametrize(
    ("train", "expected", "num_even"),
    [
        ({"advantage": "dr_grpo"}, {1: 0.5, 2: -0.5, 3: 4.0, 4: -2.0, 5: -2.0, 6: 0, 7: 0}, 2),
        ({"advantage": "rloo"}, {1: 1.0, 2: -1.0, 3: 6.0, 4: -3.0, 5: -3.0, 6: 0, 7: 0}, 2),
        (
            {"advantage": "reinforce_plus_plus_baseline"},
            # squares 1/4, 1/4, 16, 4, 4 over 7 episodes
            {
                number: value / (math.sqrt(24.5 / 7) + 1e-4)
                for number, value in {1: 0.5, 2: -0.5, 3: 4.0, 4: -2.0, 5: -2.0, 6: 0, 7: 0}.items()
            },
            2,
        ),
        (
            {"advantage": "pass_at_k", "pass_k": 2},
            # best of the pairs of (6, 0, 0): 6, 6, 0; mean 4, std sqrt(8); the others have no more than two episodes
            {1: 0, 2: 0, 3: 2 / (8**0.5 + 1e-4), 4: -1 / (8**0.5 + 1e-4), 5: -1 / (8**0.5 + 1e-4), 6: 0, 7: 0},
            3,
        ),
        (
            {"advantage": "reinforce_plus_plus"},
            # rewards 1 0 6 0 0 0 0: mean 1, squares 0 1 25 1 1 1 1
            {
                number: (reward - 1) / (math.sqrt(30 / 7) + 1e-4)
                for number, reward in {1: 1, 2: 0, 3: 6, 4: 0, 5: 0, 6: 0, 7: 0}.items()
            },
            2,
        ),
    ],
)
def test_steps_of_uneven_groups(train: dict[str, object], expected: dict[int, float], num_even: int) -> None:
    groups = [
        group(1, {1: 1.0, 2: 0.0}),
        group(2, {3: 6.0, 4: 0.0, 5: 0.0}),
        group(3, {6: 0.0}),
        group(4, {7: 0.0}),
    ]
    advantages = step(groups, **train)
    assert advantages.by_episode == pytest.approx(expected, abs=1e-9)
    assert (advantages.zero_variance_groups, advantages.singleton_groups) == (num_even, 2)


@pytest.mark.parametrize(
    ("rewards", "k", "teaches"),
    [
        ([1.0] * 7 + [0.0], 2, False),
        ([1.0] * 6 + [0.0] * 2, 2, True),
        ([1.0] * 6 + [0.0] * 2, 3, False),
        ([1.0, 0.0, 0.0, 0.0], 4, False),
        ([1.0, 0.0, 0.0, 0.0, 0.0], 4, True),
        ([0.2, 0.1, 0.2, 0.2], 2, False),
        ([0.3, 0.1, 0.2, 0.2], 2, True),
    ],
)
def test_group_whose_teams_are_all_as_good_is_counted_and_learns_nothing_from_penalties(
    rewards: list[float], k: int, teaches: bool
) -> None:
    raw = dict(enumerate(rewards))
    shaped = {number: reward - 0.01 * number for number, reward in raw.items()}
    advantages = step([group(1, raw, shaped)], advantage="pass_at_k", pass_k=k)
    assert (advantages.zero_variance_groups, any(advantages.by_episode.values())) == (int(not teaches), teaches)
    assert any(step([group(1, raw)], advantage="pass_at_k", pass_k=k).by_episode.values()) == teaches


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_lone_survivor_of_a_group_teaches_nothing_and_is_counted(advantage: str) -> None:
    # mean 0.2 of the two: the rounding of a mean over the step must not leak into exact zeros
    advantages = step([group(1, {1: 0.9}), group(2, {2: 0.1, 3: 0.3, 4: 0.7})], advantage=advantage)
    assert advantages.by_episode[1] == 0.0
    assert advantages.by_episode[4] > 0 > advantages.by_episode[2]
    assert (advantages.zero_variance_groups, advantages.singleton_groups) == (1, 1)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_penalties_do_not_make_variance_where_all_are_right(advantage: str) -> None:
    solved = group(1, {1: 1.0, 2: 1.0}, shaped={1: 1.0, 2: 0.4})
    mixed = group(2, {3: 1.0, 4: 0.0, 5: 1.0}, shaped={3: 0.5, 4: 0.0, 5: 1.0})
    advantages = step([solved, mixed], advantage=advantage)
    assert (advantages.by_episode[1], advantages.by_episode[2]) == (0.0, 0.0)
    assert advantages.by_episode[5] > advantages.by_episode[3] > advantages.by_episode[4]
    assert advantages.zero_variance_groups == 1


def test_shaped_rewards_are_what_is_trained() -> None:
    advantages = step([group(1, {1: 1.0, 2: 0.0}, shaped={1: 0.5, 2: -0.25})], advantage="dr_grpo")
    assert dict(advantages.by_episode) == {1: 0.375, 2: -0.375}


def test_episodes_left_out_count_in_the_baseline_alone() -> None:
    groups = [group(1, {1: 1.0, 2: 0.0, 3: 0.5})]
    advantages = step_advantages(groups, train=TrainConfig(advantage="dr_grpo"), left_out=[2])
    assert dict(advantages.by_episode) == {1: 0.5, 2: 0.0, 3: 0.0}
    assert advantages.left_out == {2}


def test_what_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group \[1\] comes more than once"):
        step([group(1, {1: 1.0}), group(1, {2: 1.0})])
    with pytest.raises(ValueError, match=r"episode \[2\] comes more than once"):
        step([group(1, {1: 1.0, 2: 0.0}), group(2, {2: 1.0})])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_refused_with_its_episode(reward: float) -> None:
    with pytest.raises(ValueError, match=f"group 4 episode 12: reward is {reward}"):
        group(4, {11: 1.0, 12: reward})
    with pytest.raises(ValueError, match=f"group 4 episode 12: shaped reward is {reward}"):
        group(4, {11: 1.0, 12: 0.0}, shaped={11: 1.0, 12: reward})
    with pytest.raises(ValueError, match=r"group 4: raw rewards of episodes \[11\], shaped of \[12\]"):
        group(4, {11: 1.0}, shaped={12: 1.0})
