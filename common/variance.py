"""Which groups teach nothing: the trainer gives them no advantage, and counts or replaces them."""

from __future__ import annotations

from collections.abc import Collection


def is_even(rewards: Collection[float], *, pass_k: int | None) -> bool:
    """True where nothing tells the episodes of a group apart: all rewards are equal, or there are fewer than two.

    rewards: the raw ones of its episodes with an outcome of the agent. With pass_k (train.pass_k) it is teams of so
    many that are compared, by the best of each: no two differ where all but the pass_k - 1 lowest rewards are equal,
    as one of the others is in every team, or where there are no more than pass_k episodes.

    >>> is_even([1.0, 1.0, 0.0], pass_k=None), is_even([1.0, 1.0, 0.0], pass_k=2)
    (False, True)
    """
    lone = pass_k or 1
    return len(rewards) <= lone or len(set(sorted(rewards)[lone - 1 :])) == 1
