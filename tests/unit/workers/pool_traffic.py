"""Turns over engines that take as long as a test says, in made time, for the tests of how load is spread."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable

from common.db.engines import EngineRow
from tests.unit.workers.pool_fleet import make_claim, row
from workers.engine_list import EngineList
from workers.engine_places import EnginePlaces, TurnRequest

PROMPT = (1,) * 100
MAX_TOKENS = 28
GROUP_SIZE = 4
NUM_TURNS = 4
WAIT_S = 90.0
BESIDE_SHARE = 0.05
"""How much longer an answer takes for each request that is under way on the engine."""


class Traffic:
    """`seconds`: by engine, how long an answer takes. Both may change while it goes on; so may `now`."""

    def __init__(self, *, max_in_flight: int = 1024, **seconds: float) -> None:
        self.seconds = seconds
        self.num: Counter[str] = Counter()
        """Requests by engine."""
        self.num_moves = 0
        """Turns on another engine than the turn before."""
        self.now = 1000.0
        self.weather: Callable[[str, float], float] = lambda url, now: 1.0
        """How many times as long an answer takes that is asked for now."""
        self._places = EnginePlaces(
            EngineList(self._read, clock=self._clock), wait_s=WAIT_S, max_in_flight=max_in_flight, clock=self._clock
        )
        self._numbers = itertools.count()
        self._episodes = itertools.count(10_000)

    async def ask(self, episode: int, group: int | None = None) -> tuple[TurnRequest, str]:
        """A turn, and the engine that it got."""
        turn = TurnRequest(
            claim=make_claim(episode=episode, group=episode if group is None else group),
            prompt_ids=PROMPT,
            request_id=str(next(self._numbers)),
            stop_ids=(),
            max_tokens=MAX_TOKENS,
        )
        url = await self._places.wait_for(turn, self.now + WAIT_S, "")
        self.num[url] += 1
        return turn, url

    async def ask_and_wait(self, episode: int) -> asyncio.Task[tuple[TurnRequest, str]]:
        """A turn that gets no place at once."""
        num = self._places.num_waiting
        task = asyncio.create_task(self.ask(episode))
        async with asyncio.timeout(60):
            while self._places.num_waiting == num:
                assert not task.done(), f"it got a place on {task.result()[1]}"
                await asyncio.sleep(0.001)
        return task

    def answer(self, turn: TurnRequest, url: str, *, num_sampled: int = MAX_TOKENS) -> None:
        self._places.give_back(turn, url, num_sampled=num_sampled)

    async def visit(self, url: str, *, episode: int) -> None:
        """A whole request to an engine, the only one of the run meanwhile."""
        others, self.seconds = self.seconds, {url: self.seconds[url]}
        self.now += 1.0  # The list of engines is read anew.
        turn, _ = await self.ask(episode)
        self.now += self.seconds[url]
        self.answer(turn, url)
        self.seconds = others
        self.now += 1.0

    def serve_at(self, now: float) -> None:
        """Let those who wait look again, later."""
        self.now = now
        self._places.serve_all()

    async def flow(self, *, at_once: int, num_episodes: int) -> None:
        """Play new episodes in groups, so many at once."""
        episodes = itertools.islice(self._episodes, num_episodes)
        ends: list[tuple[float, int, int, TurnRequest, str]] = []

        async def start(episode: int, number: int) -> str:
            turn, url = await self.ask(episode, episode // GROUP_SIZE)
            beside = sum(end[-1] == url for end in ends)
            life = self.seconds[url] * (1 + BESIDE_SHARE * beside) * self.weather(url, self.now)
            heapq.heappush(ends, (self.now + life, int(turn.request_id), number, turn, url))
            return url

        for episode in itertools.islice(episodes, at_once):
            await start(episode, 1)
        while ends:
            self.now, _, number, turn, url = heapq.heappop(ends)
            self.answer(turn, url)
            if number < NUM_TURNS:
                self.num_moves += await start(turn.claim.episode_id, number + 1) != url
            elif (new := next(episodes, None)) is not None:
                await start(new, 1)

    def _read(self, run_id: int) -> list[EngineRow]:
        return [row(number, url) for number, url in enumerate(self.seconds)]

    def _clock(self) -> float:
        return self.now
