"""Sandboxes that are a folder and walls around each command: chosen once by each process that makes or uses them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Backend, ExecResult, SandboxSession
from workers.sandbox.restricted import Restricted

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 100_000
"""The kernel takes at most 128 KiB in one argument."""


class Walls(Protocol):
    """How a command is kept in."""

    name: str

    async def run(self, folder: Path, command: str, *, timeout_s: float) -> ExecResult:
        """Run a shell command in the folder."""
        ...


class FolderBackend:
    """The backend for any kind of walls: another process may use other walls around the same folder."""

    def __init__(self, folders: SandboxFolders, walls: Walls) -> None:
        self.name = walls.name
        self._folders = folders
        self._walls = walls

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str]) -> None:
        self._folders.create(handle, files)

    def attach(self, handle: str) -> SandboxSession:
        self._folders.require(handle)
        return _Session(self._folders, handle, self._walls)

    def destroy(self, handle: str) -> None:
        self._folders.destroy(handle)


class _Session:
    def __init__(self, folders: SandboxFolders, handle: str, walls: Walls) -> None:
        self._folders = folders
        self._handle = handle
        self._walls = walls

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        # The agent's words may hold what no argument can: NUL, or half of a surrogate pair.
        plain = command.encode(errors="replace").replace(b"\0", b"?")
        if len(plain) > MAX_COMMAND_BYTES:
            text = f"the command has {len(plain)} bytes, the limit is {MAX_COMMAND_BYTES}\n"
            return ExecResult(exit_code=126, output=text, timed_out=False)
        return await self._walls.run(self._folders.require(self._handle), plain.decode(), timeout_s=timeout_s)


def open_backend(data_dir: Path) -> Backend:
    """Bubblewrap where it works, else limits without walls and a loud warning. Sandboxes lie below `data_dir`."""
    folders = SandboxFolders.below(data_dir)
    probe = f"0-{os.getpid()}"  # no episode has number 0
    folders.create(probe, {})
    trouble = Bubblewrap().trouble(folders.path(probe))
    folders.destroy(probe)
    if trouble is None:
        return FolderBackend(folders, Bubblewrap())
    logger.warning(
        "NO SANDBOX: %s. Commands of agents run with your files and your network in reach. Install bubblewrap "
        "(Debian: apt-get install bubblewrap) before you let an agent that you do not trust run commands",
        trouble,
    )
    return FolderBackend(folders, Restricted())
