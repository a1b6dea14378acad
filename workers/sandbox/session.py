"""An episode's sandbox as the process sees it that plays the episode: it starts the command server and ends it.

The first command starts it, in the thread of the event loop, since it shall live as long as that does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.client import MAX_COMMAND_BYTES, CommandClient, ServerLost
from workers.sandbox.file_requests import FileRequest
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import DAY_S, ExecResult, OutOfMemory, ServerCall

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE_TIMEOUT_S = 30.0
"""For a file tool: a file system in memory is never that slow."""


class Server(Protocol):
    """One start of a command server, and all that ends with it."""

    @property
    def client(self) -> CommandClient:
        """Its connection, once it is started."""
        ...

    async def start(self, folder: Path) -> None:
        """Start it around the folder and wait until it is ready. Raises ServerLost, EpisodeError."""
        ...

    async def end(self) -> None:
        """End it, started or not. Raises EpisodeError when something of it is left."""
        ...

    def explain(self, why: str) -> str:
        """Why it ended, in its own words where it said something."""
        ...

    async def died_of_memory(self) -> bool:
        """Whether the kernel has ended it for want of memory; asked when it is lost."""
        ...


class Session:
    """`SandboxSession` of a folder."""

    def __init__(
        self,
        folders: SandboxFolders,
        handle: str,
        make_server: Callable[[], Server],
        *,
        lifetime_s: float = DAY_S,
    ) -> None:
        self._folders = folders
        self._handle = handle
        self._make_server = make_server
        self._lifetime_s = lifetime_s
        self._expiry: asyncio.TimerHandle | None = None
        self._lock = asyncio.Lock()
        self._server: Server | None = None
        self._lost: EpisodeError | OutOfMemory | None = None
        """Why there is no more server: what commands had changed went with it, so no other may take its place."""

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        return await self._ask({"command": command}, command, timeout_s)

    async def python(self, code: str, *, timeout_s: float) -> ExecResult:
        return await self._ask({"python": code}, code, timeout_s)

    async def file(self, request: FileRequest) -> ExecResult:
        body = request.body()
        return await self._ask({"file": body}, "".join(map(str, body.values())), FILE_TIMEOUT_S)

    async def _ask(self, what: dict[str, object], text: str, timeout_s: float) -> ExecResult:
        num_bytes = len(text.encode(errors="replace"))
        if num_bytes > MAX_COMMAND_BYTES:
            said = f"the {next(iter(what))} has {num_bytes} bytes, the limit is {MAX_COMMAND_BYTES}\n"
            return ExecResult(exit_code=126, output=said, timed_out=False)
        return await self._through(lambda client: client.ask(what, timeout_s=timeout_s))

    async def call(self, call: ServerCall) -> tuple[dict[str, object], bytes]:
        return await self._through(lambda client: client.call(call))

    async def _through(self, ask: Callable[[CommandClient], Awaitable[T]]) -> T:
        """Ask the server, which is started if it is not; one that is lost is never replaced."""
        async with self._lock:
            folder = self._folders.require(self._handle)
            if self._lost is not None:
                raise self._lost
            try:
                if self._server is None:
                    self._server = await self._start(folder)
                return await ask(self._server.client)
            except ServerLost as error:
                of_memory = self._lost is None and self._server is not None and await self._server.died_of_memory()
                why = await self._end(str(error))
                if self._lost is None:
                    self._folders.require(self._handle)
                    text = f"sandbox {self._handle}: {why}"
                    self._lost = OutOfMemory(text) if of_memory else EpisodeError(Outcome.SANDBOX_FAILED, text)
                raise self._lost from None

    async def _start(self, folder: Path) -> Server:
        server = self._make_server()
        try:
            await server.start(folder)
        except ServerLost as error:
            await _to_its_end(server)
            raise ServerLost(server.explain(str(error))) from None
        except BaseException:
            await _to_its_end(server)
            raise
        self._expiry = asyncio.get_running_loop().call_later(self._lifetime_s, self._expire, server)
        return server

    def _expire(self, server: Server) -> None:
        """Its server, and with it all in the sandbox, ends with its connection; a command that runs learns of it."""
        self._lost = EpisodeError(
            Outcome.SANDBOX_EXPIRED,
            f"sandbox {self._handle} has run for {self._lifetime_s:g} s, as long as it may (sandbox.lifetime_s)",
        )
        server.client.close()

    async def close(self) -> None:
        async with self._lock:
            closed = EpisodeError(Outcome.SANDBOX_FAILED, f"sandbox {self._handle}: the session is closed")
            self._lost = self._lost or closed
            try:
                await self._end("")
            except EpisodeError as error:
                # What was played is good; the record is still there, by which the reaper tries again.
                logger.warning("sandbox left to the reaper handle=%s %s", self._handle, error)

    async def _end(self, why: str) -> str:
        """End the server; why it ended."""
        server, self._server = self._server, None
        if self._expiry is not None:
            self._expiry.cancel()
        if server is None:
            return why
        await _to_its_end(server)
        return server.explain(why)


async def _to_its_end(server: Server) -> None:
    """Who is cancelled meanwhile waits for it all the same, some seconds: nobody else knows the processes."""
    ending = asyncio.ensure_future(server.end())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait({ending})
        if not ending.cancelled() and (error := ending.exception()) is not None:
            logger.warning("sandbox left to the reaper: %s", error)
        raise
