"""Group-relative advantages: how much better an episode was than its siblings. They go into the loss, per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EPSILON = 1e-4
"""Keeps the division finite; next to it a standard deviation of rewards in 0..1 is large."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of the episodes of one step."""

    by_episode: Mapping[int, float]
    """Episode id -> advantage, without unit."""
    zero_variance_groups: int
    """Groups that teach nothing: all rewards equal, or one episode only."""


def group_advantages(rewards_G: Sequence[float]) -> np.ndarray:
    """[G] (r - mean) / (std + EPSILON) with the population's std; exactly 0 when all rewards are equal.

    GRPO, outcome supervision: Shao et al. 2024, "DeepSeekMath", section 4.1. Only episodes with an outcome of the
    agent may enter: a failure of infrastructure says nothing about the policy.

    >>> group_advantages([1.0, 0.0]).round(3).tolist()
    [1.0, -1.0]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) == 0 or (rewards == rewards[0]).all():
        return np.zeros(len(rewards))
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + EPSILON))


def step_advantages(groups: Iterable[Mapping[int, float]]) -> Advantages:
    """Advantages of all episodes of a step; each group is given as episode id -> reward."""
    by_episode: dict[int, float] = {}
    zero_variance_groups = 0
    for rewards_by_episode in groups:
        advantages_G = group_advantages(list(rewards_by_episode.values()))
        zero_variance_groups += not advantages_G.any()
        by_episode.update(zip(rewards_by_episode, advantages_G.tolist(), strict=True))
    return Advantages(by_episode=by_episode, zero_variance_groups=zero_variance_groups)
