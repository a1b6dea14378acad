"""HTTP to engines: one pool of connections per process, a deadline on every call, errors that name the engine.

Knows no route and no record; `workers.wires` does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from workers.engine_errors import EngineUnavailable

CONNECT_TIMEOUT_S = 30.0
"""A host that swallows packets is given up long before a generate request would be; thousands at once may queue."""
_KEEPALIVE_S = 4.0
"""Shorter than vLLM's own 5 s, so that a request is seldom sent on a connection which the server is closing."""
_DETAIL_CHARS = 300

Json = Mapping[str, object]


@dataclass
class _Connection:
    """What is known of the connection that a request went over."""

    reused: bool = False
    answered: bool = False
    """A byte of the answer has come."""


class _ClosedIdle(Exception):
    """The server had closed a kept connection, or did so while the request arrived; nothing of an answer came."""


class EngineHttp:
    """One per process, and used from one event loop: it keeps connections to all engines open."""

    def __init__(self, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None
        """None until the first call, since it belongs to the loop that runs then."""

    async def close(self) -> None:
        """Close all connections. It may be used again after it."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None) -> Any:
        """The answer's JSON object. Raises EngineUnavailable for anything else."""
        status, raw = await self.send(method, url, path, timeout_s=timeout_s, body=body)
        if status != 200:
            raise EngineUnavailable(f"engine {url} {path} answers {status}: {detail(raw)}")
        return json_object(raw, url, path)

    async def send(
        self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer, whatever they are. Raises EngineUnavailable when there is none in time.

        A request that met a kept connection's end, with no byte of an answer, is sent once more. That is safe for all
        that is asked of an engine: questions change nothing; pause, resume, load and naming leave the same state when
        done twice; an abort ends what the first one left; and if ids were already being sampled, the engine drops them
        with the connection, and nobody has seen them.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send_once(method, url + path, body)
                except _ClosedIdle:
                    return await self._send_once(method, url + path, body)
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(
                f"engine {url} {path}: no connection within {self._connect_timeout_s:g} s"
            ) from error
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {url} {path} did not answer within {timeout_s:g} s") from error
        except _ClosedIdle as error:
            raise EngineUnavailable(f"engine {url} {path}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {url} {path}: {type(error).__name__}: {error}") from error

    async def _send_once(self, method: str, target: str, body: Json | None) -> tuple[int, bytes]:
        connection = _Connection()
        try:
            async with self._open().request(method, target, json=body, trace_request_ctx=connection) as response:
                connection.answered = True
                return response.status, await response.read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # With the start of an answer, its message is that start.
            begun = connection.answered or not isinstance(getattr(error, "message", ""), str)
            if connection.reused and not begun:
                raise _ClosedIdle(f"{type(error).__name__}: {error}") from error
            raise

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_note_reuse)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                # A cookie that pins a session to a replica would pin all episodes of the process to it.
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[trace],
            )
        return self._session


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.reused = True


def detail(body: bytes) -> str:
    """What an error's body says, shortened: engines wrap the message in different ways."""
    text = body.decode(errors="replace")
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:_DETAIL_CHARS]
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(message)[:_DETAIL_CHARS]


def json_object(raw: bytes, url: str, path: str) -> dict[str, Any]:
    """The body as a JSON object. Raises EngineUnavailable."""
    try:
        reply = json.loads(raw)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise EngineUnavailable(f"engine {url} {path} answers no JSON object: {detail(raw)}")
    return reply
