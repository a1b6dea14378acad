"""Turns that wait for a place on an engine of their run, in the order in which they came.

The pool puts turns in and gives places away. One line for each engine, since a turn is best served where its prompt's
keys and values are; and nobody waits for ever for that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

HOME_PATIENCE_S = 0.5
"""How long an episode waits for its own engine, whose cache has its prompt, before another one takes it."""
OVERTAKE_S = 5.0
"""An engine serves its own line, unless somebody in another has waited so much longer."""


@dataclass(kw_only=True, eq=False)
class Waiter(Generic[T]):
    """One turn in the line."""

    turn: T
    home: str | None
    """URL of the engine in whose line it is; None = no engine serves the run now."""
    settled: bool
    """Whether the engine has the prompt in its cache, as far as is known."""
    since: float
    """Of the pool's clock."""
    choosy_until: float
    """Till then it takes no place on an engine where it would end later than where it waits. Of the pool's clock."""
    place: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """URL of the engine on which a place was taken for it."""
    number: int = 0


class Line(Generic[T]):
    """All that wait for the engines of one run. Each step costs the number of engines, whoever many wait."""

    def __init__(self) -> None:
        self._by_home: dict[str | None, OrderedDict[int, Waiter[T]]] = {}
        self._numbers = itertools.count(1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def join(self, waiter: Waiter[T]) -> None:
        """Stand at the end."""
        waiter.number = next(self._numbers)
        self._by_home.setdefault(waiter.home, OrderedDict())[waiter.number] = waiter
        self._length += 1

    def leave(self, waiter: Waiter[T]) -> bool:
        """Leave it from anywhere; False = it was not there any more."""
        waiters = self._by_home.get(waiter.home)
        if waiters is None or waiters.pop(waiter.number, None) is None:
            return False
        if not waiters:
            del self._by_home[waiter.home]
        self._length -= 1
        return True

    def next_at(self, url: str) -> Waiter[T] | None:
        """Whom the engine serves next of those who wait for it; somebody else if that one has waited much longer."""
        own = self._by_home.get(url)
        if own is None:
            return None
        first, oldest = _first(own), self._oldest()
        return oldest if oldest.since < first.since - OVERTAKE_S else first

    def next_anywhere(self, urls: Collection[str], now: float, *, sooner: Collection[str] = ()) -> Waiter[T] | None:
        """Who has waited longest, without those who still want to wait for their engine, which is one of `urls`.

        `sooner`: engines for which it is quicker to wait than to take what is free.
        """
        firsts = [
            first
            for home, waiters in self._by_home.items()
            for first in (_first(waiters),)
            if home not in urls
            or (
                (not first.settled or now - first.since >= HOME_PATIENCE_S)
                and (home not in sooner or now >= first.choosy_until)
            )
        ]
        return min(firsts, key=lambda waiter: waiter.number, default=None)

    def everyone(self) -> list[Waiter[T]]:
        """In no order."""
        return [waiter for waiters in self._by_home.values() for waiter in waiters.values()]

    def _oldest(self) -> Waiter[T]:
        return min(map(_first, self._by_home.values()), key=lambda waiter: waiter.number)


def _first(waiters: OrderedDict[int, Waiter[T]]) -> Waiter[T]:
    return next(iter(waiters.values()))
