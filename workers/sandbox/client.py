"""The worker's side of the command server. What comes from a sandbox is not trusted: all lengths and waits are bounded.

Replies go to `workers.sandbox.session`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from common.errors import RollmillError
from workers.sandbox.protocol import ExecResult, Interpreter, Limit, Limits, ServerCall

GRACE_S = 10.0
"""What the server may take beyond a command's time: it waits 5 s for processes that do not die."""
MAX_HEADER_BYTES = 4096
MAX_COMMAND_BYTES = 1 << 20


class ServerLost(RollmillError):
    """The server has ended, does not answer, or answers nonsense."""


class Reader(Protocol):
    """What comes from the server."""

    async def readexactly(self, n: int) -> bytes:
        """Raises asyncio.IncompleteReadError at the end of the stream."""
        ...


def _plain(reader: Reader) -> Reader:
    return reader


class CommandClient:
    """One connection to a server; one command at a time."""

    def __init__(self, stream: socket.socket, limits: Limits, *, unwrap: Callable[[Reader], Reader] = _plain) -> None:
        """`unwrap` takes the server's bytes out of what the connection carries."""
        self._stream = stream
        self._limits = limits
        self._unwrap = unwrap
        self._num_requests = 0
        self._reader: Reader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self, *, timeout_s: float, first: bytes = b"") -> None:
        """Wait until the server is ready. Raises ServerLost.

        `first`: what is sent before anything is expected.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._stream)
        self._reader = self._unwrap(reader)
        if first:
            self._writer.write(first)
        header, _ = await self._reply(timeout_s, 0)
        if header != {"ready": True}:
            raise ServerLost(f"the command server begins with {header!r:.100}")

    def close(self) -> None:
        """Close the connection, at which the server ends."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def run(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run a command. Cancelling stops it. Raises ServerLost: this connection is of no more use then."""
        return await self.ask({"command": command}, timeout_s=timeout_s)

    async def ask(self, what: dict[str, object], *, timeout_s: float) -> ExecResult:
        """`command`, `python` or `file`. As `run`."""
        header, output = await self._exchange(
            {
                **what,
                "timeout_s": timeout_s,
                "kept_bytes": self._limits.kept_bytes,
                "written_bytes": self._limits.written_bytes,
            },
            timeout_s=timeout_s,
            most_bytes=self._limits.kept_bytes,
        )
        return result_of(header, output)

    async def call(self, call: ServerCall) -> tuple[dict[str, object], bytes]:
        """Have the server itself do something. Raises ServerLost, also when that is more than `most_bytes`."""
        request: dict[str, object] = {"call": call.name, "given": dict(call.given)}
        return await self._exchange(request, timeout_s=call.timeout_s, most_bytes=call.most_bytes)

    async def _exchange(
        self, request: dict[str, object], *, timeout_s: float, most_bytes: int
    ) -> tuple[dict[str, object], bytes]:
        self._num_requests += 1
        self._send({"id": self._num_requests, **request})
        header, output = await self._reply(timeout_s + GRACE_S, most_bytes)
        if header.get("id") != self._num_requests:
            raise ServerLost(f"the command server answers {header.get('id')!r:.20}, not {self._num_requests}")
        return header, output

    def _send(self, request: dict[str, object]) -> None:
        assert self._writer is not None, "connect comes first"
        body = json.dumps(request).encode()
        self._writer.write(struct.pack(">I", len(body)) + body)

    async def _reply(self, timeout_s: float, most_bytes: int) -> tuple[dict[str, object], bytes]:
        # A task of its own: cancelling must not lose half a reply that has been read.
        reading = asyncio.ensure_future(self._read(most_bytes))
        try:
            await asyncio.wait({reading}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._send({"stop": True})
            await asyncio.wait({reading}, timeout=GRACE_S)
            if not reading.done() or reading.exception() is not None:
                self.close()
            raise
        finally:
            if not reading.done():
                reading.cancel()
        if not reading.done():
            raise ServerLost(f"the command server gave no answer within {timeout_s:g} s")
        return reading.result()

    async def _read(self, most_bytes: int) -> tuple[dict[str, object], bytes]:
        assert self._reader is not None, "connect comes first"
        try:
            num_header, num_output = struct.unpack(">II", await self._reader.readexactly(8))
            if num_header > MAX_HEADER_BYTES or num_output > most_bytes:
                raise ServerLost(f"the command server sends {num_header} and {num_output} bytes, which is too much")
            header = json.loads(await self._reader.readexactly(num_header))
            output = await self._reader.readexactly(num_output)
        except (OSError, asyncio.IncompleteReadError):
            raise ServerLost("the command server has ended") from None
        except ValueError as error:
            raise ServerLost(f"the command server's reply is no JSON: {error}") from None
        if not isinstance(header, dict):
            raise ServerLost(f"the command server's reply is {header!r:.100}")
        return header, output


def result_of(header: dict[str, object], output: bytes) -> ExecResult:
    """What a command's reply says. Raises ServerLost when it makes no sense."""
    try:
        return _result(header, output)
    except (KeyError, TypeError, ValueError) as error:
        raise ServerLost(f"the command server's reply makes no sense: {error!r:.100}") from None


def _result(header: dict[str, object], output: bytes) -> ExecResult:
    exit_code, num_bytes = header["exit_code"], header["num_bytes"]
    limit = None if header["limit"] is None else Limit(str(header["limit"]))
    interpreter = header.get("interpreter")
    if not isinstance(num_bytes, int) or not (exit_code is None or isinstance(exit_code, int)):
        raise TypeError(f"{exit_code!r:.50}, {num_bytes!r:.50}")
    return ExecResult(
        exit_code=exit_code,
        output=output.decode(errors="replace"),
        timed_out=limit is Limit.TIME,
        num_dropped_bytes=max(0, num_bytes - len(output)),
        limit=limit,
        interpreter=None if interpreter is None else Interpreter(str(interpreter)),
    )
