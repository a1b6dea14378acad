"""A command server that is a container's only program, spoken to over the container's own input and output.

The worker's connection is all that keeps it: when the worker dies, the engine closes the input, the server ends, and
the engine removes the container.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from common.errors import EpisodeError
from workers.sandbox.client import CommandClient, Reader, ServerLost
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.container_records import ContainerRecord
from workers.sandbox.egress_proxy import EgressProxy
from workers.sandbox.protocol import Limits
from workers.sandbox.proxy_socket import Meeting
from workers.sandbox.start_gate import StartGate

START_TIMEOUT_S = 60.0
MAX_FRAME_BYTES = 1 << 20
MAX_REMARKS_BYTES = 4096


class DockerStream:
    """Takes the container's standard output out of an attached connection, where its errors lie in between."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._output = bytearray()
        self.errors = bytearray()
        """The last that it wrote there."""

    async def readexactly(self, n: int) -> bytes:
        while len(self._output) < n:
            kind, size = struct.unpack(">BxxxI", await self._reader.readexactly(8))
            if size > MAX_FRAME_BYTES:
                raise ServerLost(f"the container engine announces {size} bytes at once, which is too much")
            data = await self._reader.readexactly(size)
            if kind == 2:
                self.errors += data
                del self.errors[:-MAX_REMARKS_BYTES]
            else:
                self._output += data
        taken = bytes(self._output[:n])
        del self._output[:n]
        return taken


class ContainerServer:
    """One container, from before it is made until it is removed."""

    def __init__(
        self,
        engine: ContainerEngine,
        threads: Executor,
        gate: StartGate,
        *,
        record: ContainerRecord,
        make: Callable[[], str],
        image: str,
        greeting: Callable[[Path], bytes],
        limits: Limits,
        is_wanted: Callable[[], bool],
        proxy: EgressProxy | None = None,
    ) -> None:
        """`make` creates the container. `greeting`: what it is told first, from the folder. `is_wanted`: still."""
        self._engine = engine
        self._threads = threads
        self._gate = gate
        self._record = record
        self._make = make
        self._image = image
        self._greeting = greeting
        self._limits = limits
        self._is_wanted = is_wanted
        self._proxy = proxy
        self._working: Future[tuple[socket.socket, bytes]] | None = None
        self._stream: DockerStream | None = None
        self._client: CommandClient | None = None
        self._started = time.time()

    @property
    def client(self) -> CommandClient:
        assert self._client is not None, "start comes first"
        return self._client

    async def start(self, folder: Path) -> None:
        async with self._gate.place():
            self._record.write()
            meeting = None if self._proxy is None else Meeting(self._record.proxy_folder)
            try:
                await self._connect(folder)
                if meeting is not None:
                    assert self._proxy is not None
                    self._proxy.serve(meeting.listener())
            finally:
                if meeting is not None:
                    meeting.close()
        # A reaper that removed the folder before the container was there did not see it.
        if not self._is_wanted():
            raise ServerLost("it was removed while it started")

    async def _connect(self, folder: Path) -> None:
        self._working = self._threads.submit(self._launch, folder)
        # Cancelling must not lose sight of a container that is being made.
        stream, greeting = await asyncio.shield(asyncio.wrap_future(self._working))
        self._client = CommandClient(stream, self._limits, unwrap=self._unwrap)
        await self._client.connect(timeout_s=START_TIMEOUT_S, first=struct.pack(">I", len(greeting)) + greeting)

    def _launch(self, folder: Path) -> tuple[socket.socket, bytes]:
        container = self._make()
        greeting = self._greeting(folder)
        stream = self._engine.attach(container)
        try:
            self._engine.start(container, self._image)
        except EpisodeError:
            stream.close()
            raise
        return stream, greeting

    def _unwrap(self, reader: Reader) -> Reader:
        self._stream = DockerStream(reader)
        return self._stream

    async def end(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._proxy is not None:
            await self._proxy.close()
        await asyncio.wrap_future(self._threads.submit(self._remove))

    def _remove(self) -> None:
        if self._working is None:
            return
        if self._working.exception() is None and self._client is None:
            self._working.result()[0].close()
        self._record.end(self._engine)

    async def died_of_memory(self) -> bool:
        look = self._threads.submit(self._engine.died_of_memory, self._record.name, since=self._started)
        try:
            return await asyncio.wrap_future(look)
        except EpisodeError:
            # The engine does not answer: whatever ended the sandbox, nobody can blame the agent.
            return False

    def explain(self, why: str) -> str:
        said = "" if self._stream is None else self._stream.errors.decode(errors="replace").strip()
        return f"{why}: {said.rpartition(chr(10))[2]:.300}" if said else why
