"""An episode's sandbox as the process sees it that plays the episode: it starts the command server and ends it.

The first command starts it, in the thread of the event loop, since it shall live as long as that does.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.client import MAX_COMMAND_BYTES, CommandClient, ServerLost
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.owners import Record
from workers.sandbox.process import Launched
from workers.sandbox.protocol import ExecResult, Limits

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0


class Walls(Protocol):
    """How a sandbox's commands are kept in."""

    name: str
    limits: Limits

    def launch(self, folder: Path) -> Launched:
        """Start a command server around the folder. Raises EpisodeError."""
        ...


class Session:
    """`SandboxSession` of a folder with walls."""

    def __init__(self, folders: SandboxFolders, handle: str, walls: Walls) -> None:
        self._folders = folders
        self._handle = handle
        self._walls = walls
        self._lock = asyncio.Lock()
        self._server: _Server | None = None
        self._lost: str | None = None
        """Why there is no more server: what commands had changed went with it, so no other may take its place."""

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        num_bytes = len(command.encode(errors="replace"))
        if num_bytes > MAX_COMMAND_BYTES:
            text = f"the command has {num_bytes} bytes, the limit is {MAX_COMMAND_BYTES}\n"
            return ExecResult(exit_code=126, output=text, timed_out=False)
        async with self._lock:
            folder = self._folders.require(self._handle)
            if self._lost is not None:
                raise EpisodeError(Outcome.SANDBOX_FAILED, f"sandbox {self._handle}: {self._lost}")
            try:
                if self._server is None:
                    self._server = await self._start(folder)
                return await self._server.client.run(command, timeout_s=timeout_s)
            except ServerLost as error:
                self._lost = await self._end(str(error))
                self._folders.require(self._handle)
                raise EpisodeError(Outcome.SANDBOX_FAILED, f"sandbox {self._handle}: {self._lost}") from None

    async def _start(self, folder: Path) -> _Server:
        server = _Server(self._walls.launch(folder), self._walls.limits)
        try:
            await server.start(self._folders, self._handle)
        except ServerLost as error:
            await server.end()
            raise ServerLost(server.explain(str(error))) from None
        except BaseException:
            await server.end()
            raise
        return server

    async def close(self) -> None:
        async with self._lock:
            self._lost = self._lost or "the session is closed"
            try:
                await self._end("")
            except EpisodeError as error:
                # What was played is good; the record is still there, by which the reaper tries again.
                logger.warning("sandbox left to the reaper handle=%s %s", self._handle, error)

    async def _end(self, why: str) -> str:
        """End the server; why it ended."""
        server, self._server = self._server, None
        if server is None:
            return why
        await server.end()
        return server.explain(why)


class _Server:
    """A server's processes, its connection, and the record of them."""

    def __init__(self, launched: Launched, limits: Limits) -> None:
        self._launched = launched
        self.client = CommandClient(launched.stream, limits)
        self._record: Record | None = None

    async def start(self, folders: SandboxFolders, handle: str) -> None:
        """Wait until it is ready, and note whose it is before it does anything. Raises ServerLost, EpisodeError."""
        await self.client.connect(timeout_s=START_TIMEOUT_S)
        owned = self._launched.owned()
        if owned is None:
            raise ServerLost("the command server has ended")
        self._record = folders.owners.record(handle, owned)
        # A reaper that removed the folder before the record was there did not see these processes.
        if not folders.exists(handle):
            raise ServerLost("it was removed while it started")

    async def end(self) -> None:
        self.client.close()
        await self._launched.end()
        if self._record is not None:
            self._record.remove()

    def explain(self, why: str) -> str:
        """Why it ended, in its own words where it said something."""
        remarks = self._launched.remarks()
        return f"{why}: {remarks:.300}" if remarks else why
