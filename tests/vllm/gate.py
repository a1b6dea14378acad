"""A proxy before an engine that stops one chosen request: before the engine has it, or before its answer goes back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

import aiohttp
from aiohttp import web

TIMEOUT_S = 300.0


class Side(StrEnum):
    """Where a request stops."""

    BEFORE = "before"
    """The engine has not seen it."""
    AFTER = "after"
    """The engine has done it, and whoever asked does not know."""


@dataclass(kw_only=True)
class Stop:
    """The next request to `path` whose body holds `word` is stopped."""

    path: str
    side: Side
    word: str = ""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    delivers: bool = False
    """What happens at the release: it goes on its way, or its connection is cut."""
    status: int | None = None
    """Of the engine's answer; None = there is none yet."""

    async def wait(self, *, within_s: float) -> None:
        """Return when a request stands here; TimeoutError if none does in time."""
        async with asyncio.timeout(within_s):
            await self.reached.wait()

    def release(self, *, delivers: bool) -> None:
        self.delivers = delivers
        self.released.set()


class Gate:
    """Has a URL of its own, under which the engine is registered."""

    def __init__(self, target: str, *, shut: str | None = None) -> None:
        """`shut` is a route that it has not; None = it has all of the engine's."""
        self._target = target
        self._shut = shut
        self.num_aborted = 0
        """Requests that the engine ended as aborted."""
        self.num_refused = 0
        """Requests that the engine's fence kept away."""
        self._stop: Stop | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
        # A connection for each request: one to an engine that was killed in between breaks.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=limit, connector=connector)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    @property
    def url(self) -> str:
        assert self._runner is not None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def stop_next(self, path: str, side: Side, *, word: str = "") -> Stop:
        """Stop the next such request; the answer's `reached` is set when it is there."""
        self._stop = Stop(path=path, side=side, word=word)
        return self._stop

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == self._shut:
            return web.Response(status=404)
        stop = self._stop
        if stop is None or request.path != stop.path or stop.word not in body.decode():
            return await self._forward(request, body)
        self._stop = None
        # Shielded from the end of the connection: whoever asked is killed while the request stands here.
        return await asyncio.shield(asyncio.ensure_future(self._held(stop, request, body)))

    async def _held(self, stop: Stop, request: web.Request, body: bytes) -> web.StreamResponse:
        answer = await self._forward(request, body) if stop.side is Side.AFTER else None
        stop.reached.set()
        await stop.released.wait()
        if not stop.delivers:
            return _cut(request)
        answer = answer or await self._forward(request, body)
        stop.status = answer.status
        return answer

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        headers = {"Content-Type": request.content_type} if body else {}
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body or None, headers=headers
            ) as answer:
                said = await answer.read()
                self.num_aborted += b'"finish_reason":"abort"' in said
                self.num_refused += answer.status == 409
                return web.Response(status=answer.status, body=said, content_type=answer.content_type or None)
        except (aiohttp.ClientError, OSError):
            return _cut(request)


def _cut(request: web.Request) -> web.Response:
    """What an engine's death looks like: the connection breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
