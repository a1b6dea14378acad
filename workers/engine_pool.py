"""Samples each turn of the RUN fleet on one of the run's engines, and sees it through when engines fail or abort.

Who waits: a turn waits for a place on an engine that serves its run at a fresh enough version. What ends the wait is
another request's end, a risen limit, a changed row in the database or the end of an engine's back-off (both looked for
every CACHE_S, once for all who wait), or the deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import FinishReason, Sampled
from workers.agent import Generated, OutOfTime
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable
from workers.engine_list import EngineList
from workers.engine_places import EnginePlaces, EngineUse, TurnRequest
from workers.engine_pressure import MAX_IN_FLIGHT, parse_pressure

WATCH_EVERY_S = 1.0
"""How often each engine that works for this process is asked for its pressure."""
READ_TIMEOUT_S = 2.0
"""Of that question. Without an answer the limit stays."""


class EnginePool:
    """One per process, used from one event loop. Its limits stay as they are while `watch_pressure` does not run."""

    def __init__(
        self,
        client: EngineClient,
        list_engines: Callable[[int], list[EngineRow]],
        *,
        wait_s: float,
        max_in_flight: int = MAX_IN_FLIGHT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`list_engines` reads a run's engines by the run's id; it is called in a thread.

        An engine never gets more than `max_in_flight` requests of this process at once.
        """
        self._client = client
        self._wait_s = wait_s
        self._clock = clock
        self._engines = EngineList(list_engines, clock=clock)
        self._places = EnginePlaces(self._engines, wait_s=wait_s, max_in_flight=max_in_flight, clock=clock)

    @property
    def uses(self) -> Mapping[str, EngineUse]:
        """URL -> what this process knows of the engine."""
        return self._places.uses

    @property
    def num_waiting(self) -> int:
        """Turns that have no place on an engine."""
        return self._places.num_waiting

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
        among all workers. Raises EpisodeError(ENGINE_LOST) when no engine had a place for `wait_s`, OutOfTime when
        requests took more than `limit_s` (None = no limit), and what the client raises.
        """
        budget = claim.rollout.max_sampled(len(prompt_ids))
        turn = TurnRequest(
            claim=claim, prompt_ids=tuple(prompt_ids), request_id=request_id, stop_ids=stop_ids, max_tokens=budget
        )
        so_far: Sampled | None = None
        busy_s = 0.0
        why = f"no engine serves run {claim.config.name}"
        deadline = self._clock() + self._wait_s
        for number in itertools.count():
            url = await self._places.wait_for(turn, deadline, why)
            asked, num_sampled = self._clock(), 0
            try:
                async with asyncio.timeout(None if limit_s is None else limit_s - busy_s):
                    part = await self._ask(url, turn, so_far, number)
                if part.finish_reason is not FinishReason.ABORT:
                    num_sampled = len(part.ids)
            except TimeoutError:
                raise OutOfTime(f"engine {url} had not answered when the agent's time was used up") from None
            except EngineUnavailable as error:
                self._places.failed(url)
                why = str(error)
                continue
            finally:
                self._places.give_back(turn, url, num_sampled=num_sampled)
            busy_s += self._clock() - asked
            if not part.ids:
                self._places.failed(url)
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

    async def watch_pressure(self, *, every_s: float = WATCH_EVERY_S) -> None:
        """Steer the engines' limits until cancelled. Waits for: the next reading, whatever the engines answer."""
        while True:
            await asyncio.gather(*(self._steer(url, engine) for url, engine in list(self.uses.items())))
            self._places.serve_all()
            await asyncio.sleep(every_s)

    async def _steer(self, url: str, engine: EngineUse) -> None:
        if not engine.flight.num and not engine.flight.reached:
            engine.flight.skip()
            return
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                engine.flight.steer(parse_pressure(await self._client.metrics(url)))
        except (EngineUnavailable, TimeoutError):
            engine.flight.skip()  # Its requests say better what it lacks.

    async def _ask(self, url: str, turn: TurnRequest, so_far: Sampled | None, number: int) -> Sampled:
        sampled_ids = so_far.ids if so_far else ()
        claim = turn.claim
        adapted = claim.config.train.lora_rank is not None
        return await self._client.generate(
            url,
            # A request that timed out here may still run there, so each try has an id of its own.
            request_id=f"{turn.request_id}.{number}",
            prompt_ids=(*turn.prompt_ids, *sampled_ids),
            max_tokens=turn.max_tokens - len(sampled_ids),
            temperature=claim.rollout.temperature,
            top_p=claim.rollout.top_p,
            stop_ids=turn.stop_ids,
            model=None,
            run=claim.config.name,
            adapter=self._engines.version(claim.run_id, url) if adapted else None,
        )


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
