"""How runs share a fleet: weighted max-min fair shares of the episodes in flight, in whole groups. Pure.

Progressive filling (Bertsekas & Gallager, "Data Networks", section 6.5.2) in steps of a group: the next one goes to
the run that would then have the fewest episodes for its weight. What a run has no use for is left to the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run has in flight, and what more it could use."""

    weight: float
    """Its share is in proportion to it; 0 = it gets what the others leave."""
    group_size: int
    """Episodes of one of its groups."""
    in_flight: int
    """Its episodes that are not final."""
    room: int
    """Groups that it could make now, under the staleness bound and its own limits."""

    @property
    def most(self) -> int:
        """Episodes in flight that it has a use for."""
        return self.in_flight + self.room * self.group_size

    @property
    def first(self) -> int:
        """Episodes of its first step: what is left of a group that is under way, or a whole one."""
        return min(self.in_flight % self.group_size or self.group_size, self.most)


def fair_shares(capacity: int, demands: Sequence[Demand]) -> list[int]:
    """Episodes that each run may have in flight, of `capacity` for all of them.

    Nobody gets more than it can use, and nothing is left over that would be a group for somebody. The sum is within
    the capacity, or, where that is too little for one group of each run with a weight, exactly those.
    """
    return _fill(_bound(capacity, demands), demands, start=[0] * len(demands), most=[demand.most for demand in demands])


def new_groups(capacity: int | None, demands: Sequence[Demand]) -> list[int]:
    """Groups to make now for each run: up to its share, while there is room under the capacity for all.

    Nobody is interrupted: what a run has beyond its share goes to the others when it ends. None = no capacity to share.
    """
    if capacity is None:
        return [demand.room for demand in demands]
    before = [demand.in_flight for demand in demands]
    shares = fair_shares(capacity, demands)
    whole = [
        demand.in_flight + max(0, share - demand.in_flight) // demand.group_size * demand.group_size
        for demand, share in zip(demands, shares, strict=True)
    ]
    after = _fill(_bound(capacity, demands) - sum(before), demands, start=before, most=whole)
    return [(now - then) // demand.group_size for demand, now, then in zip(demands, after, before, strict=True)]


def _bound(capacity: int, demands: Sequence[Demand]) -> int:
    """The capacity, raised to what lets each run with a weight have a group: or a small one would starve."""
    return max(capacity, sum(demand.first for demand in demands if demand.weight > 0))


def _fill(budget: int, demands: Sequence[Demand], *, start: Sequence[int], most: Sequence[int]) -> list[int]:
    """Add groups to `start`, one at a time, to whom has the fewest for its weight, while the budget lasts."""
    given = list(start)
    queue = [_turn(demand, given[index], index) for index, demand in enumerate(demands)]
    heapq.heapify(queue)
    while queue:
        index = heapq.heappop(queue)[-1]
        step = demands[index].first if given[index] == 0 else demands[index].group_size
        # Who cannot have this step cannot have a later one: they are no smaller, and the budget only shrinks.
        if 0 < step <= min(budget, most[index] - given[index]):
            given[index] += step
            budget -= step
            heapq.heappush(queue, _turn(demands[index], given[index], index))
    return given


def _turn(demand: Demand, given: int, index: int) -> tuple[int, float, int]:
    """When a run's next group comes: first groups, then the others by weight, then the background."""
    after = given + demand.group_size
    if demand.weight == 0:
        return 2, after, index
    return (0 if given == 0 else 1), after / demand.weight, index
