"""Chooses an engine for each turn of the RUN fleet, and sees the turn through when engines fail or abort under it.

Who waits: a turn waits for an engine that serves its run at a fresh enough version. What ends the wait is a changed
row in the database (read every CACHE_S by one of the waiters), the end of an engine's back-off, or the deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, FinishReason, Sampled
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.agent import Generated, OutOfTime
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable

CACHE_S = 0.2
"""How old the list of engines may be, and how often a waiting turn looks again."""
EPISODE_SLACK = 8
"""An episode stays with its engine until that has this many requests of its size more than the idlest."""
GROUP_SLACK = 2
"""The same for an episode's first turn: siblings share a prompt, and with it the engine's prefix cache."""
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 2.0
MAX_REMEMBERED = 10_000
"""Episodes and groups whose engine is remembered, the latest ones. Forgetting one costs a prefill."""


@dataclass(kw_only=True)
class EngineUse:
    """What this process knows of an engine."""

    outstanding: int = 0
    """Tokens of prompts and budgets of the requests that have no answer yet."""
    chosen: int = 0
    """Number of the choice that took it last."""
    failures: int = 0
    """In a row."""
    avoid_until: float = 0.0
    """Of the pool's clock."""


@dataclass(kw_only=True)
class _Reading:
    """The last reading of a run's engines, perhaps still under way."""

    rows: asyncio.Future[list[EngineRow]]
    started: float
    """Of the pool's clock."""


@dataclass(frozen=True, kw_only=True)
class _Turn:
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
class _Homes:
    """Which engine episodes, or groups, were sent to last."""

    urls: OrderedDict[int, str] = field(default_factory=OrderedDict)

    def remember(self, key: int, url: str) -> None:
        self.urls[key] = url
        self.urls.move_to_end(key)
        if len(self.urls) > MAX_REMEMBERED:
            self.urls.popitem(last=False)


class EnginePool:
    """One per process, used from one event loop. Other processes' requests are not seen in its loads."""

    def __init__(
        self,
        client: EngineClient,
        list_engines: Callable[[int], list[EngineRow]],
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`list_engines` reads a run's engines by the run's id; it is called in a thread."""
        self._client = client
        self._list_engines = list_engines
        self._wait_s = wait_s
        self._clock = clock
        self.uses: dict[str, EngineUse] = {}
        """URL -> what this process knows of the engine."""
        self._episodes = _Homes()
        self._groups = _Homes()
        self._choices = itertools.count(1)
        self._readings: dict[int, _Reading] = {}

    async def generate(
        self,
        claim: Claim,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        stop_ids: tuple[int, ...],
        limit_s: float | None = None,
    ) -> Generated:
        """What was sampled, the engine that finished it, and the time that requests took, waiting left out.

        A failed engine costs nothing but time: the request goes to another one. An aborted request goes on where it
        stopped, and never gets more ids in all than its turn and its row have room for. `request_id` must be unique
        among all workers. Raises EpisodeError(ENGINE_LOST) when no engine took it for `wait_s`, OutOfTime when requests
        took more than `limit_s` (None = no limit), and what the client raises.
        """
        budget = claim.config.rollout.max_sampled(len(prompt_ids))
        turn = _Turn(
            claim=claim, prompt_ids=tuple(prompt_ids), request_id=request_id, stop_ids=stop_ids, max_tokens=budget
        )
        so_far: Sampled | None = None
        busy_s = 0.0
        why = f"no engine serves run {claim.config.name}"
        deadline = self._clock() + self._wait_s
        for number in itertools.count():
            url = await self._wait_for_engine(turn, deadline, why)
            asked = self._clock()
            try:
                async with asyncio.timeout(None if limit_s is None else limit_s - busy_s):
                    part = await self._ask(url, turn, so_far, number)
            except TimeoutError:
                raise OutOfTime(f"engine {url} had not answered when the agent's time was used up") from None
            except EngineUnavailable as error:
                self._failed(url)
                why = str(error)
                continue
            busy_s += self._clock() - asked
            if not part.ids:
                self._failed(url)
                why = f"engine {url} aborted the request"
                continue
            self.uses[url].failures = 0
            so_far = joined(so_far, part) if so_far else part
            if so_far.finish_reason is not FinishReason.ABORT:
                return Generated(sampled=so_far, engine=url, latency_ms=round(1000 * busy_s))
            if len(so_far.ids) == budget:
                whole = replace(so_far, finish_reason=FinishReason.LENGTH)
                return Generated(sampled=whole, engine=url, latency_ms=round(1000 * busy_s))
            deadline = self._clock() + self._wait_s
        raise AssertionError("the loop has no other end")

    async def _ask(self, url: str, turn: _Turn, so_far: Sampled | None, number: int) -> Sampled:
        sampled_ids = so_far.ids if so_far else ()
        engine = self.uses[url]
        engine.outstanding += turn.size
        try:
            return await self._client.generate(
                url,
                # A request that timed out here may still run there, so each try has an id of its own.
                request_id=f"{turn.request_id}.{number}",
                prompt_ids=(*turn.prompt_ids, *sampled_ids),
                max_tokens=turn.max_tokens - len(sampled_ids),
                temperature=turn.claim.config.rollout.temperature,
                top_p=turn.claim.config.rollout.top_p,
                stop_ids=turn.stop_ids,
                model=None,
                run=turn.claim.config.name,
            )
        finally:
            engine.outstanding -= turn.size

    async def _wait_for_engine(self, turn: _Turn, deadline: float, why: str) -> str:
        while True:
            rows = await self._read_engines(turn.claim.run_id, deadline)
            if url := self._choose(turn, fresh_enough(rows, turn.claim.config.train.max_staleness)):
                return url
            left = deadline - self._clock()
            if left <= 0:
                raise EpisodeError(Outcome.ENGINE_LOST, f"{why}, for {self._wait_s:g} s")
            await asyncio.sleep(min(CACHE_S, left))

    def _choose(self, turn: _Turn, urls: list[str]) -> str | None:
        """The episode's engine, else its group's, while they are not much busier than the idlest; else the idlest."""
        now = self._clock()
        engines = {url: self.uses.setdefault(url, EngineUse()) for url in urls}
        engines = {url: engine for url, engine in engines.items() if engine.avoid_until <= now}
        if not engines:
            return None
        # Ties go to the one chosen longest ago: while all are idle, the first would get every episode for life.
        url = min(engines, key=lambda url: (engines[url].outstanding, engines[url].chosen))
        least = engines[url].outstanding
        for home, slack in (
            (self._episodes.urls.get(turn.claim.episode_id), EPISODE_SLACK),
            (self._groups.urls.get(turn.claim.group_id), GROUP_SLACK),
        ):
            if home in engines and engines[home].outstanding <= least + slack * turn.size:
                url = home
                break
        engines[url].chosen = next(self._choices)
        self._episodes.remember(turn.claim.episode_id, url)
        self._groups.remember(turn.claim.group_id, url)
        return url

    def _failed(self, url: str) -> None:
        engine = self.uses[url]
        backoff = min(MIN_BACKOFF_S * 2.0 ** min(engine.failures, 10), MAX_BACKOFF_S)
        engine.failures += 1
        engine.avoid_until = self._clock() + backoff

    async def _read_engines(self, run_id: int, deadline: float) -> list[EngineRow]:
        """The run's engines as of CACHE_S ago or later. All who wait share one reading."""
        now = self._clock()
        reading = self._readings.get(run_id)
        if reading is None or (reading.rows.done() and now - reading.started >= CACHE_S):
            rows = asyncio.ensure_future(asyncio.to_thread(self._list_engines, run_id))
            reading = self._readings[run_id] = _Reading(rows=rows, started=now)
        try:
            async with asyncio.timeout(max(deadline - now, CACHE_S)):
                return await asyncio.shield(reading.rows)
        except TimeoutError:
            raise EpisodeError(Outcome.ENGINE_LOST, "the list of engines could not be read in time") from None


def fresh_enough(rows: Sequence[EngineRow], max_staleness: int) -> list[str]:
    """URLs of the engines that take new work: serving, and not further behind the newest than the run's bound.

    Samples of an engine that lags more would be dropped as stale as soon as they are complete.
    """
    versions = {row.url: row.version for row in rows if row.state is EngineState.SERVING and row.version is not None}
    newest = max([*versions.values(), *(row.newest or 0 for row in rows)], default=0)
    return [url for url, version in versions.items() if version >= newest - max_staleness]


def joined(first: Sampled, rest: Sampled) -> Sampled:
    """An aborted request and its resumption as one: ids, log-probs and spans in order, the end is the rest's."""
    offset = len(first.ids)
    moved = [span.model_copy(update={"start": span.start + offset, "end": span.end + offset}) for span in rest.spans]
    spans = list(first.spans)
    if spans and moved and spans[-1].version == moved[0].version:
        last = spans.pop()
        moved[0] = last.model_copy(update={"end": moved[0].end})
    return Sampled(
        ids=first.ids + rest.ids,
        logprobs=first.logprobs + rest.logprobs,
        spans=(*spans, *moved),
        finish_reason=rest.finish_reason,
    )
