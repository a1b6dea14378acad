"""A command server that is a process of the worker's, within walls or not. `Session` starts it and ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from common.config import SandboxKind
from workers.sandbox.client import CommandClient, ServerLost
from workers.sandbox.egress_proxy import EgressProxy
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.owners import Record
from workers.sandbox.process import Launched
from workers.sandbox.protocol import OPEN, Limits, SandboxSpec
from workers.sandbox.proxy_socket import lent_listener

START_TIMEOUT_S = 30.0


class Walls(Protocol):
    """How a sandbox's commands are kept in."""

    name: SandboxKind
    limits: Limits

    def launch(self, folder: Path) -> Launched:
        """Start a command server around the folder. Raises EpisodeError."""
        ...


class ProcessServer:
    """A server's processes, its connection, and the record of them."""

    def __init__(self, walls: Walls, folders: SandboxFolders, handle: str, spec: SandboxSpec = OPEN) -> None:
        """`spec.network`: as the walls have been told, whose proxy this is."""
        self._walls = walls
        self._spec = spec
        self._proxy: EgressProxy | None = None
        self._folders = folders
        self._handle = handle
        self._launched: Launched | None = None
        self._client: CommandClient | None = None
        self._record: Record | None = None

    @property
    def client(self) -> CommandClient:
        assert self._client is not None, "start comes first"
        return self._client

    async def start(self, folder: Path) -> None:
        """Wait until it is ready, and note whose it is before it does anything. Raises ServerLost, EpisodeError.

        In the thread of the event loop, since it shall live as long as that does.
        """
        launched = self._launched = self._walls.launch(folder)
        self._client = CommandClient(launched.stream, self._walls.limits)
        await self._client.connect(timeout_s=START_TIMEOUT_S, first=launched.first)
        if launched.lent is not None:
            self._proxy = EgressProxy(self._spec.network, handle=self._handle)
            self._proxy.serve(lent_listener(launched.lent))
        owned = launched.owned(lifetime_s=self._spec.lifetime_s)
        if owned is None:
            raise ServerLost("the command server has ended")
        self._record = self._folders.owners.record(self._handle, owned)
        # A reaper that removed the folder before the record was there did not see these processes.
        if not self._folders.exists(self._handle):
            raise ServerLost("it was removed while it started")

    async def end(self) -> None:
        if self._launched is None:
            return
        self.client.close()
        if self._proxy is not None:
            await self._proxy.close()
        await self._launched.end()
        if self._record is not None:
            self._record.remove()

    async def died_of_memory(self) -> bool:
        return self._launched is not None and await self._launched.died_of_memory()

    def explain(self, why: str) -> str:
        remarks = "" if self._launched is None else self._launched.remarks()
        return f"{why}: {remarks:.300}" if remarks else why
