"""The way out of a sandbox: an HTTP proxy in the worker, for the destinations on the list of its run or task.

It answers on a socket of the sandbox's own loopback, which the sandbox's server made and handed over: nothing in the
sandbox leads out, and nothing of the worker's network is in reach. A name is looked up once, its address checked, and
that address connected to.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Self

from common.config_network import Destination, NetworkConfig
from common.public_address import is_public
from workers.sandbox.proxy_request import MAX_HEAD_BYTES, Refused, Request, read_request

logger = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[list[str]]]
"""A host's addresses. Raises OSError."""
NUM_AT_ONCE = 16
"""Connections of one sandbox; more wait."""
NUM_LAST_WORDS = 20
"""Connections beyond the limit that are told so; after them nobody listens any more."""
NUM_TRIED = 3
"""Addresses of one host."""
LOOKUP_TIMEOUT_S = CONNECT_TIMEOUT_S = 15.0
NUM_LOOKUPS = 8
"""Of a process; not in the loop's own threads, which must not wait for somebody's slow name server."""
FAREWELL_S = 1.0
CHUNK_BYTES = 64 << 10
ACCEPT_PAUSE_S = 0.5


class _Cut(Exception):
    """A limit was met in the middle of a connection."""


@dataclass
class _Used:
    """What an episode has used of a limit."""

    setting: str
    most: int
    num: int = 0

    def add(self, num: int) -> None:
        """Raises Refused when it is too much."""
        self.num += num
        if self.num > self.most:
            raise Refused("403 Forbidden", f"the limit of {self.most} is used up ([sandbox.network] {self.setting})")


@dataclass(frozen=True, kw_only=True)
class _Connection:
    """Closed at the end of its block: in order where that ended so, else at once."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                # What was written must still go out.
                self.writer.close()
                await self.writer.wait_closed()
        finally:
            self.writer.transport.abort()


class EgressProxy:
    """Of one sandbox, from its start to its end."""

    def __init__(self, policy: NetworkConfig, *, handle: str, resolve: Resolve | None = None) -> None:
        """`handle`: the sandbox's, `<episode>-<attempt>`."""
        self._policy = policy
        self._resolve = resolve or look_up
        episode, _, attempt = handle.partition("-")
        self._whose = f"episode={episode} attempt={attempt}"
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self._connections = _Used("max_connections", policy.max_connections)
        self._sent = _Used("max_sent_bytes", policy.max_sent_bytes)
        self._received = _Used("max_received_bytes", policy.max_received_bytes)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, listener: socket.socket) -> None:
        """Answer on it until `close`, which closes it too."""
        listener.setblocking(False)
        self._start(self._accept(listener), listener)

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None], own: socket.socket) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Cancelled before its first step, it would never come to that.
        task.add_done_callback(lambda _: own.close())

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while self._connections.num < self._connections.most + NUM_LAST_WORDS:
            await self._places.acquire()
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("the proxy cannot take a connection %s: %s", self._whose, error)
                self._places.release()
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._connections.num += 1
            self._start(self._serve(client), client)

    async def _serve(self, client: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=client, limit=MAX_HEAD_BYTES)
            agent = _Connection(reader=reader, writer=writer)
            async with asyncio.timeout(self._policy.max_connection_s), agent:
                try:
                    await self._answer(agent)
                except Refused as refusal:
                    await self._refuse(agent, refusal)
        except (OSError, asyncio.IncompleteReadError) as error:
            # A timeout is one of these: the connection's time was up, or the agent said nothing.
            logger.debug("a connection of the sandbox ended %s %r", self._whose, error)
        finally:
            self._places.release()

    async def _answer(self, agent: _Connection) -> None:
        request = await read_request(agent.reader)
        for used in (self._connections, self._sent, self._received):
            used.add(0)
        where = request.destination
        if not self._is_listed(where):
            raise Refused(
                "403 Forbidden", f"{where.host}:{where.port} is not on the list: [sandbox.network] allow of the run"
            )
        if request.num_body_bytes and request.num_body_bytes > self._sent.most - self._sent.num:
            raise Refused("413 Content Too Large", "more than may be sent ([sandbox.network] max_sent_bytes)")
        before = self._sent.num, self._received.num
        try:
            async with await self._connect(where) as server:
                await self._exchange(agent, server, request)
        except _Cut as cut:
            # The agent is in the middle of what the server says; nobody can tell it more.
            logger.warning("connection cut off %s host=%r port=%d: %s", self._whose, where.host, where.port, cut)
        finally:
            sent, received = self._sent.num - before[0], self._received.num - before[1]
            logger.info(
                "asked for %s host=%r port=%d sent_bytes=%d received_bytes=%d",
                *(self._whose, where.host, where.port, sent, received),
            )

    def _is_listed(self, where: Destination) -> bool:
        return any(
            listed.port == where.port
            and (
                listed.host == where.host
                or (listed.host.startswith("*.") and where.address is None and where.host.endswith(listed.host[1:]))
            )
            for listed in self._policy.destinations
        )

    async def _connect(self, where: Destination) -> _Connection:
        trouble: Exception = OSError("it has no address")
        for address in await self._addresses(where):
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(address, where.port, limit=CHUNK_BYTES)
            except OSError as error:
                trouble = error
                continue
            ours, theirs = writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0]
            if where.address is None and ours == theirs:
                writer.transport.abort()
                raise self._no_way(where, [address], "leads to the worker's own machine")
            return _Connection(reader=reader, writer=writer)
        raise Refused("502 Bad Gateway", f"{where.host}:{where.port} does not answer: {str(trouble) or 'no answer'}")

    async def _addresses(self, where: Destination) -> list[str]:
        """Where a listed host is; an address on the list is meant as it is."""
        if where.address is not None:
            return [where.host]
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await self._resolve(where.host)
        except OSError as error:
            raise Refused("502 Bad Gateway", f"the name {where.host} is not known: {error}") from None
        public = [address for address in found if is_public(address)]
        if not public:
            raise self._no_way(where, found, "has no public address")
        return public[:NUM_TRIED]

    def _no_way(self, where: Destination, found: list[str], why: str) -> Refused:
        # What the addresses are is the node's secret, and the operator's matter.
        logger.warning("refused %s host=%r port=%d at %s: it %s", self._whose, where.host, where.port, found, why)
        return Refused(
            "403 Forbidden", f"{where.host} {why}: [sandbox.network] allow of the run must name such an address itself"
        )

    async def _exchange(self, agent: _Connection, server: _Connection, request: Request) -> None:
        if request.num_body_bytes is None:
            agent.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            self._sent.add(len(request.head))
            server.writer.write(request.head)
        sending = asyncio.ensure_future(pump(agent.reader, server.writer, self._sent, num_bytes=request.num_body_bytes))
        receiving = asyncio.ensure_future(pump(server.reader, agent.writer, self._received, num_bytes=None))
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            await receiving
            if request.num_body_bytes is None:
                await sending
        except Refused as refusal:
            raise _Cut(refusal.why) from None
        finally:
            sending.cancel()
            receiving.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _refuse(self, agent: _Connection, refusal: Refused) -> None:
        logger.info("refused %s: %s", self._whose, refusal.why)
        why = refusal.why.encode("ascii", "replace")
        body = b"rollmill: " + why + b"\n"
        # In the first line as well: of an answer to CONNECT, programs show nothing else.
        head = b"HTTP/1.1 " + refusal.status.encode() + b" (" + why + b")\r\nContent-Type: text/plain\r\n"
        agent.writer.write(head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        agent.writer.write_eof()
        # Closed with something unread, the kernel would throw the answer away.
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while await agent.reader.read(CHUNK_BYTES):
                    pass


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, used: _Used, *, num_bytes: int | None
) -> None:
    """Pass on so many bytes, or all (None), and the end. Raises Refused, OSError."""
    left = num_bytes
    while left is None or left > 0:
        chunk = await reader.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
        if not chunk:
            break
        used.add(len(chunk))
        writer.write(chunk)
        await writer.drain()
        left = None if left is None else left - len(chunk)
    # A second request behind the body goes nowhere.
    while left is not None and await reader.read(CHUNK_BYTES):
        pass
    writer.write_eof()


@cache
def _lookups() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="lookups")


async def look_up(host: str) -> list[str]:
    """By the node's own way of finding names."""

    def ask() -> list[str]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(each[4][0]) for each in found))

    return await asyncio.get_running_loop().run_in_executor(_lookups(), ask)
