"""Advantages against values computed by hand."""

from __future__ import annotations

import math

import pytest

from trainer.advantages import group_advantages, step_advantages


def test_values_of_a_group_by_hand() -> None:
    # mean 1/4, population variance (9 + 3) / 4 / 16 = 3/16
    std = math.sqrt(3) / 4
    expected = [0.75 / (std + 1e-4), -0.25 / (std + 1e-4), -0.25 / (std + 1e-4), -0.25 / (std + 1e-4)]
    assert group_advantages([1.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx(expected, abs=1e-12)


def test_better_than_the_siblings_is_positive_and_the_sum_is_zero() -> None:
    advantages = group_advantages([0.2, 0.9, 0.4])
    assert advantages[1] > 0 > advantages[2] > advantages[0]
    assert advantages.sum() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 8, [1.0], [0.0, 0.0], []])
def test_group_without_variance_gives_exact_zeros(rewards: list[float]) -> None:
    assert group_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_groups_have_baselines_of_their_own() -> None:
    advantages = step_advantages([{1: 1.0, 2: 0.0}, {3: 11.0, 4: 10.0}, {5: 1.0, 6: 1.0}, {7: 0.0}])
    one = 0.5 / (0.5 + 1e-4)
    assert advantages.by_episode == pytest.approx({1: one, 2: -one, 3: one, 4: -one, 5: 0, 6: 0, 7: 0})
    assert advantages.zero_variance_groups == 2
