"""Gives each turn a place on an engine, or a line to wait in: episodes and siblings at home, else the first to end.

The pool sends the request and gives the place back. A place is one request under way; an engine's limit says how many
there are, and is steered by `engine_pressure`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from common.db.episodes import Claim
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.engine_line import Line, Waiter
from workers.engine_list import CACHE_S, EngineList
from workers.engine_pace import ALIKE, Pace, slownesses
from workers.engine_pressure import InFlight

BESIDE = 4
"""So many requests of its size under way beside it make a request take about twice as long."""
EPISODE_SLACK = 8
"""An episode stays with its engine until that has this many requests of its size more than the idlest; fewer, the
slower the engine is: load passes, while a slow engine costs the episode time in each turn."""
GROUP_SLACK = 2
"""The same for an episode's first turn: siblings share a prompt, and with it the engine's prefix cache."""
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 2.0
MAX_REMEMBERED = 10_000
"""Episodes and groups whose engine is remembered, the latest ones. Forgetting one costs a prefill."""


@dataclass(kw_only=True)
class EngineUse:
    """What this process knows of an engine."""

    flight: InFlight
    pace: Pace = field(default_factory=Pace)
    outstanding: int = 0
    """Tokens of prompts and budgets of the requests that have no answer yet."""
    queued: int = 0
    """The same of turns that wait in this process for a place on it."""
    chosen: int = 0
    """Number of the choice that took it last."""
    failures: int = 0
    """In a row."""
    avoid_until: float = 0.0
    """Of the pool's clock."""

    @property
    def load(self) -> int:
        return self.outstanding + self.queued


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One model call, as asked for."""

    claim: Claim
    prompt_ids: tuple[int, ...]
    request_id: str
    stop_ids: tuple[int, ...]
    max_tokens: int

    @property
    def size(self) -> int:
        """What it may cost an engine, in tokens."""
        return len(self.prompt_ids) + self.max_tokens


@dataclass(kw_only=True)
class _Run:
    """The engines that a run may use, or one evaluation of it, and who waits for them."""

    name: str
    urls: list[str] = field(default_factory=list)
    """Of engines that may take new work, as last read."""
    line: Line[TurnRequest] = field(default_factory=Line)
    watching: asyncio.Task[None] | None = None
    """Looks for engines while somebody waits."""


@dataclass(kw_only=True)
class _Homes:
    """Which engine episodes, or groups, were sent to last."""

    urls: OrderedDict[int, str] = field(default_factory=OrderedDict)

    def remember(self, key: int, url: str) -> None:
        self.urls[key] = url
        self.urls.move_to_end(key)
        if len(self.urls) > MAX_REMEMBERED:
            self.urls.popitem(last=False)


class EnginePlaces:
    """One per process, used from one event loop. Other processes' requests are seen only in the engines' pressure."""

    def __init__(
        self, engines: EngineList, *, wait_s: float, max_in_flight: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wait_s` is how long a turn waits for a place."""
        self._engines = engines
        self._wait_s = wait_s
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.uses: dict[str, EngineUse] = {}
        """URL -> what this process knows of the engine."""
        self._episodes = _Homes()
        self._groups = _Homes()
        self._choices = itertools.count(1)
        self._runs: dict[tuple[int, int | None], _Run] = {}
        """By run and the version that is evaluated, None for training: they may not use the same engines."""

    @property
    def num_waiting(self) -> int:
        """Turns that have no place."""
        return sum(len(run.line) for run in self._runs.values())

    async def wait_for(self, turn: TurnRequest, deadline: float, why: str) -> str:
        """URL of an engine on which a place was taken for the turn; it must be given back.

        Raises EpisodeError(ENGINE_LOST) at the deadline; `why` says what was wrong with the engine it had before.
        """
        claim = turn.claim
        run = self._runs.setdefault(_key(claim), _Run(name=claim.config.name))
        run.urls = await self._engines.urls_by(
            deadline, claim.run_id, claim.config.train.max_staleness, version=claim.eval_version
        )
        self._serve(run)  # Those who came before.
        engines = self._available(run)
        slowness = self._slowness(engines)
        home = self._choose(turn, engines, slowness) if engines else None
        settled = home is not None and home == self._episodes.urls.get(turn.claim.episode_id)
        if home and engines[home].flight.has_room:
            return self._take(turn, home)
        roomy = _with_room(engines)
        if roomy and home and not settled and not self._sooner_at(home, turn.size, roomy, slowness):
            return self._take(turn, self._choose(turn, roomy, slowness))
        return await self._stand_in_line(run, turn, home, settled=settled, deadline=deadline, why=why)

    async def _stand_in_line(
        self, run: _Run, turn: TurnRequest, home: str | None, *, settled: bool, deadline: float, why: str
    ) -> str:
        now = self._clock()
        half = now + (deadline - now) / 2
        waiter = Waiter(turn=turn, home=home, settled=settled, since=now, choosy_until=half)
        self._join(run, waiter)
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await waiter.place
        except TimeoutError:
            self._hand_back(waiter)
            if self._available(run):
                why = f"all engines of run {run.name} are full"
            raise EpisodeError(Outcome.ENGINE_LOST, f"{why}, for {self._wait_s:g} s") from None
        except asyncio.CancelledError:
            self._hand_back(waiter)
            raise
        finally:
            self._leave(run, waiter)

    def _join(self, run: _Run, waiter: Waiter[TurnRequest]) -> None:
        run.line.join(waiter)
        if waiter.home is not None:
            self.uses[waiter.home].queued += waiter.turn.size
            self.uses[waiter.home].flight.reached = True
            self._remember(waiter.turn, waiter.home)
        if run.watching is None:
            run.watching = asyncio.create_task(self._look_for_engines(waiter.turn.claim))
            run.watching.add_done_callback(partial(_tell_all, run))

    def _leave(self, run: _Run, waiter: Waiter[TurnRequest]) -> None:
        if run.line.leave(waiter) and waiter.home is not None:
            self.uses[waiter.home].queued -= waiter.turn.size
        if not run.line and run.watching is not None:
            run.watching.cancel()
            run.watching = None

    def _hand_back(self, waiter: Waiter[TurnRequest]) -> None:
        """Cancelled at the moment in which it got a place: that would be lost for ever."""
        if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
            self.give_back(waiter.turn, waiter.place.result())

    async def _look_for_engines(self, claim: Claim) -> None:
        """Waits for: the next look, as long as somebody waits for a place. Cancelled when nobody does."""
        while True:
            await asyncio.sleep(CACHE_S)
            run = self._runs[_key(claim)]
            run.urls = await self._engines.urls(
                claim.run_id, claim.config.train.max_staleness, version=claim.eval_version
            )
            self._serve(run)

    def serve_all(self) -> None:
        """Give away what risen limits left free."""
        for run in list(self._runs.values()):
            self._serve(run)

    def _serve(self, run: _Run) -> None:
        """Give away the places that are free: to those who wait for the engine itself, then to all who wait."""
        if not run.line:
            return
        engines = self._available(run)
        for url, engine in engines.items():
            while engine.flight.has_room and (waiter := run.line.next_at(url)):
                self._grant(run, waiter, url)
        slowness = self._slowness(engines)
        while run.line and (roomy := _with_room(engines)):
            sooner = {url for url in engines if url not in roomy and self._sooner_at(url, 0, roomy, slowness)}
            waiter = run.line.next_anywhere(engines, self._clock(), sooner=sooner)
            if waiter is None:
                break
            self._grant(run, waiter, self._choose(waiter.turn, roomy, slowness))

    def _grant(self, run: _Run, waiter: Waiter[TurnRequest], url: str) -> None:
        self._leave(run, waiter)
        if not waiter.place.done():
            waiter.place.set_result(self._take(waiter.turn, url))

    def _take(self, turn: TurnRequest, url: str) -> str:
        engine = self.uses[url]
        engine.outstanding += turn.size
        engine.flight.take()
        engine.pace.asked(turn.request_id, max_tokens=turn.max_tokens, now=self._clock())
        engine.chosen = next(self._choices)
        self._remember(turn, url)
        return url

    def give_back(self, turn: TurnRequest, url: str, *, num_sampled: int = 0) -> None:
        """The request has ended, in whatever way; `num_sampled` 0 = with no whole answer."""
        engine = self.uses[url]
        engine.pace.ended(turn.request_id, num_sampled=num_sampled, now=self._clock())
        engine.outstanding -= turn.size
        engine.flight.give_back()
        for (run_id, _), run in list(self._runs.items()):
            if run_id == turn.claim.run_id:
                self._serve(run)

    def _available(self, run: _Run) -> dict[str, EngineUse]:
        """The run's engines without those that failed a moment ago."""
        now = self._clock()
        for url in run.urls:
            if url not in self.uses:
                self.uses[url] = EngineUse(flight=InFlight(maximum=self._max_in_flight))
        return {url: self.uses[url] for url in run.urls if self.uses[url].avoid_until <= now}

    def _slowness(self, engines: Mapping[str, EngineUse]) -> dict[str, float]:
        return slownesses({url: engine.pace for url, engine in engines.items()}, self._clock())

    def _choose(self, turn: TurnRequest, engines: Mapping[str, EngineUse], slowness: Mapping[str, float]) -> str:
        """The episode's engine, else its group's, while it would end there not much later than at best; else the best.

        The best is where it would end first, by what the engine has to do and how slow it is.
        """

        def end(url: str, slowness: float) -> float:
            """In tokens of the fastest engine."""
            return slowness * (engines[url].load + BESIDE * turn.size)

        # Ties go to the one chosen longest ago: while all are idle, the first would get every episode for life.
        best = min(engines, key=lambda url: (end(url, slowness[url]), engines[url].chosen))
        latest = end(best, slowness[best])
        for home, slack in (
            (self._episodes.urls.get(turn.claim.episode_id), EPISODE_SLACK),
            (self._groups.urls.get(turn.claim.group_id), GROUP_SLACK),
        ):
            # In doubt it stays: engines that work in bursts look slow by turns, and each move costs a prefill.
            if home is not None and home in engines:
                slow = slowness[home]
                if end(home, max(1.0, slow / ALIKE)) <= latest + slack * turn.size / slow:
                    return home
        return best

    def _sooner_at(self, home: str, new: int, roomy: Mapping[str, EngineUse], slowness: Mapping[str, float]) -> bool:
        """Whether the last of those who wait at the full engine `home` ends sooner than one that takes what is free.

        `new`: tokens that are about to join them. They get places as those under way end.
        """
        rounds = (self.uses[home].queued + new) / self.uses[home].outstanding
        return min(slowness[url] for url in roomy) > slowness[home] * (1 + rounds)

    def _remember(self, turn: TurnRequest, url: str) -> None:
        self._episodes.remember(turn.claim.episode_id, url)
        self._groups.remember(turn.claim.group_id, url)

    def failed(self, url: str) -> None:
        """Give it no turn for a while, and longer with each failure in a row."""
        engine = self.uses[url]
        backoff = min(MIN_BACKOFF_S * 2.0 ** min(engine.failures, 10), MAX_BACKOFF_S)
        engine.failures += 1
        engine.avoid_until = self._clock() + backoff


def _with_room(engines: Mapping[str, EngineUse]) -> dict[str, EngineUse]:
    return {url: engine for url, engine in engines.items() if engine.flight.has_room}


def _key(claim: Claim) -> tuple[int, int | None]:
    return claim.run_id, claim.eval_version


def _tell_all(run: _Run, looking: asyncio.Task[None]) -> None:
    """The engines cannot be read: that is an answer, too, for all who wait."""
    if looking.cancelled() or (error := looking.exception()) is None:
        return
    run.watching = None
    for waiter in run.line.everyone():
        if not waiter.place.done():
            waiter.place.set_exception(error)
