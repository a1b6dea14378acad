"""Advantages: how much better an episode was than those it is compared with. They go into the loss, per token.

Legend: G episodes of a group, E episodes of a step. Only episodes with an outcome of the agent may enter: a failure of
infrastructure says nothing about the policy. Groups need not be of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, isfinite

import numpy as np

from common.config_train import TrainConfig
from common.variance import is_even

EPSILON = 1e-4
"""Keeps the division finite; next to it a standard deviation of rewards in 0..1 is large."""

GroupAdvantages = Callable[[Sequence[float]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """Rewards of a group's episodes with an outcome of the agent. A group is one task in one run."""

    group_id: int
    raw: Mapping[int, float]
    """Episode id -> reward of the evaluation. It decides whether the group is one without variance."""
    shaped: Mapping[int, float]
    """Episode id -> reward that is trained: raw, or with penalties taken off."""

    def __post_init__(self) -> None:
        if self.raw.keys() != self.shaped.keys():
            raise ValueError(
                f"group {self.group_id}: raw rewards of episodes {sorted(self.raw)}, shaped of {sorted(self.shaped)}"
            )
        for episode_id in self.raw:
            for kind, reward in (("reward", self.raw[episode_id]), ("shaped reward", self.shaped[episode_id])):
                if not isfinite(reward):
                    raise ValueError(f"group {self.group_id} episode {episode_id}: {kind} is {reward}")


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of the episodes of one step."""

    by_episode: Mapping[int, float]
    """Episode id -> advantage, without unit."""
    zero_variance_groups: int
    """Groups whose raw rewards tell no episodes apart (common/variance.py), those of one episode included."""
    singleton_groups: int
    """Groups of one episode: there is nothing to compare it with."""
    left_out: frozenset[int] = frozenset()
    """Ids of episodes that count in the baseline and not in the loss; their advantage is 0."""


def grpo(rewards_G: Sequence[float]) -> np.ndarray:
    """[G] (r - mean) / (std + EPSILON) with the population's std; exactly 0 when all rewards are equal.

    GRPO, outcome supervision: Shao et al. 2024, "DeepSeekMath", section 4.1.

    >>> grpo([1.0, 0.0]).round(3).tolist()
    [1.0, -1.0]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if _all_equal(rewards):
        return np.zeros(len(rewards))
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + EPSILON))


def dr_grpo(rewards_G: Sequence[float]) -> np.ndarray:
    """[G] r - mean, not divided by the std, which would weigh the easiest and the hardest tasks most.

    Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2. Its other half is
    average = "constant".

    >>> dr_grpo([1.0, 0.0]).tolist()
    [0.5, -0.5]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if _all_equal(rewards):
        return np.zeros(len(rewards))
    return np.asarray(rewards - rewards.mean())


def rloo(rewards_G: Sequence[float]) -> np.ndarray:
    """[G] r - mean of the others' rewards: a baseline that does not depend on the episode itself; 0 for one alone.

    RLOO: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!", section 3; for language models Ahmadian
    et al. 2024, "Back to basics", the section on REINFORCE leave-one-out.

    >>> rloo([1.0, 0.0, 0.0]).tolist()
    [1.0, -0.5, -0.5]
    """
    count = len(rewards_G)
    return dr_grpo(rewards_G) * (count / (count - 1)) if count > 1 else np.zeros(count)


def pass_at_k(rewards_G: Sequence[float], *, k: int) -> np.ndarray:
    """[G] (mean of the best reward over the k-subsets with the episode - mean over all of them) / (std + EPSILON).

    An episode is worth what it adds to a team of k. 0 where there are not more than k episodes, or all teams are equal.

    Pass@k training: Chen et al. 2025, "Pass@k training for adaptively balancing exploration and exploitation of large
    reasoning models", the section on the analytical derivation; for rewards of 0 and 1 these are its values. The mean
    over subsets by sorted rewards: Walder and Karkhanis 2025, "Pass@K policy optimization", the section on continuous
    rewards.

    >>> pass_at_k([1.0, 0.0, 0.0, 0.0], k=2).round(3).tolist()
    [1.0, -0.333, -0.333, -0.333]
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    count = len(rewards)
    if is_even(rewards.tolist(), pass_k=k):
        return np.zeros(count)
    order = np.argsort(rewards, kind="stable")
    ranked = rewards[order]
    # The best of a subset is the one of rank i in comb(i, k - 1) subsets, and so is it in those with a given episode of
    # lower rank j < i in comb(i - 1, k - 2).
    is_best = np.array([comb(rank, k - 1) for rank in range(count)], dtype=np.float64)
    above = np.array([comb(rank - 1, k - 2) if rank else 0 for rank in range(count)], dtype=np.float64)
    mean = is_best @ ranked / comb(count, k)
    std = np.sqrt(is_best @ (ranked - mean) ** 2 / comb(count, k))
    higher = np.append(np.cumsum((above * ranked)[::-1])[::-1][1:], 0.0)
    with_episode = (is_best * ranked + higher) / comb(count - 1, k - 1)
    advantages = np.empty(count)
    advantages[order] = (with_episode - mean) / (std + EPSILON)
    return advantages


def reinforce_plus_plus(values_E: Sequence[float]) -> np.ndarray:
    """[E] (x - mean) / (std + EPSILON) over all episodes of a step, each counting once; 0 when all are equal.

    REINFORCE++: Hu et al. 2025, "REINFORCE++", the section on global advantage normalisation.
    """
    return grpo(values_E)


def reinforce_plus_plus_baseline(differences_E: Sequence[float]) -> np.ndarray:
    """[E] x / (std + EPSILON) over all episodes of a step, where x is the reward less the mean of its group.

    REINFORCE++ with baseline: Hu et al. 2025, as above. The mean over the step is 0 already; to take it off once more
    would turn the exact zeros of groups without variance into rounding errors.
    """
    differences = np.asarray(differences_E, dtype=np.float64)
    return np.asarray(differences / (differences.std() + EPSILON)) if len(differences) else differences


def step_advantages(
    groups: Sequence[GroupRewards], *, train: TrainConfig, left_out: Collection[int] = ()
) -> Advantages:
    """Advantages of all episodes of a step, by train.advantage; 0 for those in `left_out`.

    A group whose raw rewards are all equal, or with pass_at_k those of all its teams, gives exact zeros even if
    penalties tell its episodes apart: what is left to learn from them would be to be short (Yu et al. 2025, "DAPO",
    filters on the raw reward, too). reinforce_plus_plus alone learns from such groups, by comparison with the rest of
    the step. Raises ValueError for an episode or group that comes twice.
    """
    _refuse_repetition("group", [group.group_id for group in groups])
    _refuse_repetition("episode", [episode_id for group in groups for episode_id in group.raw])
    baseline = _group_advantages(train)
    by_episode: dict[int, float] = {}
    even = {group.group_id for group in groups if is_even(group.raw.values(), pass_k=train.pass_k)}
    for group in groups:
        rewards_G = list(group.shaped.values())
        is_zero = group.group_id in even and train.advantage != "reinforce_plus_plus"
        advantages_G = np.zeros(len(rewards_G)) if is_zero else baseline(rewards_G)
        by_episode.update(zip(group.shaped, advantages_G.tolist(), strict=True))
    over_the_step = {
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    }.get(train.advantage)
    if over_the_step is not None:
        by_episode = dict(zip(by_episode, over_the_step(list(by_episode.values())).tolist(), strict=True))
    return Advantages(
        by_episode=by_episode | dict.fromkeys(left_out, 0.0),
        left_out=frozenset(left_out),
        zero_variance_groups=len(even),
        singleton_groups=sum(len(group.raw) == 1 for group in groups),
    )


def _group_advantages(train: TrainConfig) -> GroupAdvantages:
    """What is computed group by group."""
    if train.advantage == "pass_at_k":
        assert train.pass_k is not None
        return partial(pass_at_k, k=train.pass_k)
    by_name: dict[str, GroupAdvantages] = {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_plus_plus": np.asarray,
        "reinforce_plus_plus_baseline": dr_grpo,
    }
    return by_name[train.advantage]


def _all_equal(rewards_G: np.ndarray) -> bool:
    return len(rewards_G) == 0 or bool((rewards_G == rewards_G[0]).all())


def _refuse_repetition(what: str, ids: Sequence[int]) -> None:
    if len(set(ids)) < len(ids):
        twice = sorted({number for number in ids if ids.count(number) > 1})
        raise ValueError(f"{what} {twice} comes more than once in a step")
