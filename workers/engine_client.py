"""Talks to engines, for the engine pool (generate) and the weight keeper (everything else), whatever wire they speak.

Every call has a time limit, and every answer is checked: a call that returns has done what its name says.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from common.config import InFlight
from common.episode import Sampled
from workers.engine_errors import EngineUnavailable, Unversioned
from workers.engine_http import EngineHttp, detail
from workers.engine_reply import parse_adapters_in_use
from workers.wires.base import PROBE_TIMEOUT_S, GenerateRequest, Route, RouteMissing, Wire, context_of
from workers.wires.completions import CompletionsWire
from workers.wires.sglang import MODEL_INFO, SglangWire
from workers.wires.vllm import VllmWire

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineClient:
    """One per process, and used from one event loop.

    An engine is taken for vLLM with the generate route until it has no such route; then it is asked what it is. That
    is remembered until the engine fails, since what comes back at its address may be another.
    """

    def __init__(self, *, timeout_s: float, http: EngineHttp | None = None) -> None:
        """`timeout_s` is the time limit of one generate request; `http` None = connections of its own."""
        self._timeout_s = timeout_s
        self._http = http or EngineHttp()
        self._wires: dict[str, Wire] = {}
        """URL -> the wire that it is known to speak."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The client may be used again after it."""
        await self._http.close()

    async def generate(
        self,
        url: str,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        stop_ids: Sequence[int],
        model: str | None,
        run: str,
        adapter: int | None = None,
    ) -> Sampled:
        """Sample up to `max_tokens` ids after `prompt_ids`, ending early at one of `stop_ids`.

        `model` is the name that the engine serves, None = whichever. `adapter` is the version of the run whose LoRA
        adapter to sample with; None = the engine's own weights. `request_id` must be unique on the engine.
        Raises EngineUnavailable, ContextOverflow, or EpisodeError: what the engine sampled can't be trained on, or
        the request itself is wrong. Cancelling closes the connection, which makes the engine stop.
        """
        request = GenerateRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_ids=stop_ids,
            model=model,
            run=run,
            adapter=adapter,
        )
        return await self._through(url, lambda wire: wire.generate(request, timeout_s=self._timeout_s))

    def wire(self, url: str) -> str | None:
        """Name of the wire that the engine is known to speak; None = it was not asked yet, or failed since."""
        wire = self._wires.get(url)
        return wire.name if wire else None

    async def check_health(self, url: str) -> None:
        """Return if the engine says that it can decode."""
        await self._through(url, lambda wire: wire.check_health())

    async def metrics(self, url: str) -> str:
        """Its figures in Prometheus' text format; "" if it has no such page."""
        status, body = await self._http.send("GET", url, "/metrics", timeout_s=PROBE_TIMEOUT_S)
        if status not in (200, 404):
            raise EngineUnavailable(f"engine {url} /metrics answers {status}: {detail(body)}")
        return body.decode(errors="replace") if status == 200 else ""

    async def context(self, url: str) -> int | None:
        """How many ids its context holds, as whatever wire says it; None = it does not say."""
        try:
            return await context_of(Route(self._http, url))
        except RouteMissing:
            return None

    async def weight_version(self, url: str) -> str:
        """The name of the weights that it samples from."""
        return await self._through(url, lambda wire: wire.weight_version())

    async def is_paused(self, url: str) -> bool:
        """Whether it holds requests back."""
        return await self._through(url, lambda wire: wire.is_paused())

    async def pause(self, url: str, *, in_flight: InFlight = "keep", claim: int | None = None) -> None:
        """Decode nothing until `resume`; all keys and values are then computed anew. Twice is no error.

        Requests under way are frozen, are waited for (no longer than one may take), or end as aborted.
        `claim`, here and below, is the number under which the database gave the engine to whoever asks; a vLLM that
        `rollmill engine serve` started raises Superseded when it has seen a newer one. None = done in any case.
        """
        await self._through(url, lambda wire: wire.pause(in_flight, wait_s=self._timeout_s, claim=claim))

    async def resume(self, url: str, *, claim: int | None = None) -> None:
        """Let requests go on. Without a pause it is no error."""
        await self._through(url, lambda wire: wire.resume(claim=claim))

    async def load_version(self, url: str, path: Path, name: str, *, claim: int | None = None) -> None:
        """Read a version's folder into the engine. Raises LoadRefused when it says that the old weights serve on.

        After EngineUnavailable, nobody knows which weights it has.
        """
        await self._through(url, lambda wire: wire.load_version(path, name, claim=claim))

    async def update_weight_version(self, url: str, name: str, *, claim: int | None = None) -> None:
        """Make it report this name for tokens that it samples from now on."""
        await self._through(url, lambda wire: wire.update_weight_version(name, claim=claim))

    async def load_adapter(self, url: str, path: Path, name: str) -> None:
        """Read an adapter's folder beside what runs, so that requests can name it. Raises LoadRefused.

        After EngineUnavailable, nobody knows whether it is there; `adapters` tells.
        """
        await self._through(url, lambda wire: wire.load_adapter(path, name))

    async def unload_adapter(self, url: str, name: str) -> None:
        """Forget an adapter: a request that names it from now on is refused, those under way go on."""
        await self._through(url, lambda wire: wire.unload_adapter(name))

    async def adapters(self, url: str) -> dict[str, str]:
        """Name -> folder of the adapters that requests can name."""
        return await self._through(url, lambda wire: wire.adapters())

    async def adapters_in_use(self, url: str) -> set[str]:
        """Names of the adapters that some request runs or waits with."""
        page = await self.metrics(url)
        if not page:
            raise EngineUnavailable(f"engine {url} has no /metrics, and so does not say which adapters are in use")
        return parse_adapters_in_use(page)

    async def abort(self, url: str, request_ids: Sequence[str]) -> int | None:
        """End these requests, with what they have sampled; returns how many the engine says it ended.

        That proves nothing: vLLM counts the ids that it was given, known or not, and SGLang says nothing (None). What
        does is the answer of each request, which ends by `abort`.
        """
        assert request_ids, "an empty list would end the requests of everybody"
        return await self._through(url, lambda wire: wire.abort(request_ids))

    async def _through(self, url: str, call: Callable[[Wire], Awaitable[T]]) -> T:
        """Make the call on the engine's wire; where that has no such route, find the wire first."""
        wire = self._wires.get(url) or VllmWire(self._http, url)
        try:
            done = await call(wire)
        except RouteMissing:
            other = await self._other(url, wire)
            if other is None:
                raise
            done = await call(other)
            logger.info("engine speaks another wire engine=%s wire=%s", url, other.name)
            wire = other
        except Unversioned:
            raise
        except EngineUnavailable:
            self._wires.pop(url, None)
            raise
        self._wires[url] = wire
        return done

    async def _other(self, url: str, wire: Wire) -> Wire | None:
        """What an engine speaks that has no such route of `wire`'s; None = nothing that is known here."""
        if not isinstance(wire, SglangWire):
            status, _ = await self._http.send("GET", url, MODEL_INFO, timeout_s=PROBE_TIMEOUT_S)
            if status == 200:
                return SglangWire(self._http, url)
            return None if isinstance(wire, CompletionsWire) else CompletionsWire(self._http, url)
        return VllmWire(self._http, url)
