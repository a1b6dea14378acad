"""Sandboxes that are a folder and walls around it: chosen once by each process that makes or uses them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Backend, SandboxSession
from workers.sandbox.restricted import Restricted
from workers.sandbox.session import Session, Walls

logger = logging.getLogger(__name__)


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
        return Session(self._folders, handle, self._walls)

    def destroy(self, handle: str) -> None:
        self._folders.destroy(handle)


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
