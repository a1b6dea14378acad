"""Keeps an owner that lost a vLLM server from changing it: its late requests are refused with status 409.

vLLM's API server imports `Fence` by --middleware, in an environment that knows nothing of our packages: standard
library only. Requests without a claim pass: they are those of people, and of programs that know nothing of claims.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

CLAIM = "claim"
"""The query parameter: a number that grows with each time that somebody sets out to load the engine."""
OPENS = "/pause"
CLOSES = "/resume"
UNDER_AN_OPEN_CLAIM = frozenset(
    {
        "/collective_rpc",
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    }
)
"""A claim is open from its pause to its resume, and in the server that was paused only: one started anew knows nothing
of it."""
REFUSED = 409
BAD_REQUEST = 400
MAX_DIGITS = 30

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Fence:
    """ASGI middleware. One API server process must have all requests: each knows its own claims only."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._newest = 0
        self._closed = False
        """Whether the newest has had its resume, or began with it: nothing more is done under it."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        given = _claim(scope)
        if given is None:
            await self._app(scope, receive, send)
            return
        # Whole before it is judged: the rest of a request may be as late as all of it.
        request = await _whole(receive)
        if request is None:
            return
        if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS):
            await _answer(send, BAD_REQUEST, "BadRequest", f"claim={given[:MAX_DIGITS]!r} is no whole number")
            return
        path, claim = scope["path"], int(given)
        if refusal := self._refusal(path, claim):
            await _answer(send, REFUSED, "Superseded", refusal)
            return
        self._newest, self._closed = claim, path == CLOSES
        await self._app(scope, _again(request, receive), send)

    def _refusal(self, path: str, claim: int) -> str | None:
        if claim < self._newest:
            return f"{path} comes too late: claim {claim} is older than {self._newest}"
        if claim > self._newest and path in UNDER_AN_OPEN_CLAIM:
            return f"{path} without a pause: claim {claim} was not opened in this server"
        if claim == self._newest and self._closed and path != CLOSES:
            return f"{path} comes too late: claim {claim} ended with its resume"
        return None


def _claim(scope: Message) -> str | None:
    """Of a request that the fence is for, as it was given; None = it passes."""
    if scope["type"] != "http" or scope["path"] not in {OPENS, CLOSES, *UNDER_AN_OPEN_CLAIM}:
        return None
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get(CLAIM)
    return given[-1] if given else None


async def _whole(receive: Receive) -> Message | None:
    """The request with all of its body; None = whoever sends it has gone."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return {"type": "http.request", "body": body, "more_body": False}


def _again(request: Message, receive: Receive) -> Receive:
    """What gives the request that was read, and then what comes after it."""
    read = [request]

    async def give() -> Message:
        return read.pop() if read else await receive()

    return give


async def _answer(send: Send, status: int, kind: str, why: str) -> None:
    body = json.dumps({"error": {"message": why, "type": kind, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
