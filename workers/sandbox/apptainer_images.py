"""The backend for Apptainer: INIT sees that a container of the image can be had, RUN starts it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.apptainer import Apptainer
from workers.sandbox.client import ServerLost
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.process_server import ProcessServer
from workers.sandbox.protocol import OPEN, SandboxSession, SandboxSpec
from workers.sandbox.session import Session

PROBE = "0-2"
"""No episode has number 0."""


class ApptainerImages:
    """Sandboxes of image files on this node's file systems."""

    def __init__(self, folders: SandboxFolders, *, image: str | None = None, program: str = "apptainer") -> None:
        """`image`: for sandboxes whose spec names none."""
        self._folders = folders
        self._image = image
        self._program = program
        self._lock = threading.Lock()
        self._proven: set[tuple[str, float]] = set()
        """Images whose containers start, and within walls, each with the time of its last change."""

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        image = spec.image or self._image
        if image is None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                "no image for a sandbox of kind apptainer: set ROLLMILL_SANDBOX_IMAGE, or sandbox.image of the run",
            )
        if spec.network.mode == "proxy":
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                '[sandbox.network] mode = "proxy" cannot be had with apptainer: take bubblewrap or docker',
            )
        return spec.model_copy(update={"kind": "apptainer", "image": image})

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        self.prove(self.walls(spec))
        self._folders.create(handle, files)

    def prove(self, walls: Apptainer) -> None:
        """Start one container of the image, the first time. Raises EpisodeError that says what to do."""
        key = (str(walls.image), walls.image.stat().st_mtime)
        with self._lock:
            if key not in self._proven:
                self._folders.create(PROBE, {})
                try:
                    asyncio.run(self._probe(walls))
                finally:
                    self._folders.destroy(PROBE)
                self._proven.add(key)

    async def _probe(self, walls: Apptainer) -> None:
        server = ProcessServer(walls, self._folders, PROBE)
        why = None
        try:
            await server.start(self._folders.path(PROBE))
        except ServerLost as error:
            why = str(error)
        finally:
            await server.end()
        if why is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED, f"a container of image {walls.image} is no sandbox: {server.explain(why)}"
            )

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        self._folders.require(handle)
        walls = self.walls(spec)
        server = lambda: ProcessServer(walls, self._folders, handle, spec)  # noqa: E731
        return Session(self._folders, handle, server, lifetime_s=spec.lifetime_s)

    def walls(self, spec: SandboxSpec = OPEN) -> Apptainer:
        """Those of the spec's image. Raises EpisodeError when there is no such image."""
        name = self.choose(spec).image
        assert name is not None
        if "://" in name:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"image {name} would be fetched for each episode: apptainer pull image.sif {name}, and name that file",
            )
        path = Path(name).absolute()
        if not path.exists():
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"there is no image {path} on this node: put it on a file system that all nodes see (apptainer pull, "
                "apptainer build)",
            )
        return Apptainer(path, program=self._program, has_ip=spec.network.mode != "none")

    def destroy(self, handle: str) -> None:
        self._folders.destroy(handle)

    def sweep(self) -> None:
        """Nothing: its processes end with their worker, and each has a record."""
