"""Sandboxes that are containers of Docker Engine or Podman: INIT sees that one can be had, RUN starts it.

As with the other kinds INIT leaves a folder with the task's files; here they are sent into the container, whose engine
may be another machine.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.client import ServerLost
from workers.sandbox.container_engine import ContainerEngine, EngineFacts, Image, Pull
from workers.sandbox.container_options import DISKS, STATE, host_options, memory_bytes, num_processes, process_options
from workers.sandbox.container_records import ContainerRecords
from workers.sandbox.container_server import ContainerServer
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.launching import server_config, server_source
from workers.sandbox.protocol import OPEN, Limits, SandboxSession, SandboxSpec
from workers.sandbox.seccomp_profile import profile
from workers.sandbox.session import Session
from workers.sandbox.start_gate import StartGate

GVISOR = "runsc"
PROBE = "0-1"
"""No episode has number 0."""


def shared_endpoint(url: str) -> str | None:
    """The URL where every node reaches the same engine by it; None = it means another one on each."""
    if not url.startswith("tcp://"):
        return None
    host = urlsplit(url).hostname or ""
    return None if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.") else url


class Containers:
    """The backend for one engine."""

    def __init__(
        self,
        folders: SandboxFolders,
        engine: ContainerEngine,
        *,
        image: str | None = None,
        pull: Pull = "missing",
        runtime: str | None = None,
        num_starts: int = 4,
        limits: Limits | None = None,
    ) -> None:
        """`image`: for sandboxes whose spec names none."""
        self._folders = folders
        self.engine = engine
        self._image = image
        self._pull = pull
        self._runtime = runtime
        self._limits = limits or Limits()
        data_dir = folders.root.parent
        self.records = ContainerRecords(root=data_dir / "sandbox-containers")
        self._gate = StartGate(data_dir / "sandbox-starts", num_places=num_starts)
        # A start and an end block a thread each, so as many ends as starts go on at once.
        self._threads = ThreadPoolExecutor(2 * num_starts, thread_name_prefix="containers")
        self._lock = threading.Lock()
        self._proven: set[str] = set()
        """Ids of images whose containers start, and within walls."""

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        image = spec.image or self._image
        if image is None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                "no image for a sandbox of kind docker: set ROLLMILL_SANDBOX_IMAGE, or sandbox.image of the run",
            )
        return SandboxSpec(kind="docker", image=image, endpoint=shared_endpoint(self.engine.url))

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        self.prove(self._image_of(spec))
        if spec.endpoint is None:
            self._folders.create(handle, files)

    def prove(self, name: str) -> Image:
        """Get the image, and start one container of it, the first time. Raises EpisodeError that says what to do."""
        image = self.engine.image(name, pull=self._pull)
        if image.volumes:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"image {name} declares volumes, which no limit holds: build it without {', '.join(image.volumes)}",
            )
        with self._lock:
            if image.id not in self._proven:
                asyncio.run(self._probe(name))
                self._proven.add(image.id)
        return image

    async def _probe(self, name: str) -> None:
        server = self._server(PROBE, name, is_wanted=lambda: True)
        try:
            await server.start(Path("/nonexistent"))
        except ServerLost as error:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"a container of image {name} at {self.engine.url} is no sandbox: {server.explain(str(error))}",
            ) from None
        finally:
            await server.end()

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        if spec.endpoint is not None:
            self._folders.create(handle, spec.files or {})
        self._folders.require(handle)
        image = self._image_of(spec)
        wanted = lambda: self._folders.exists(handle)  # noqa: E731
        return Session(self._folders, handle, lambda: self._server(handle, image, is_wanted=wanted))

    def _image_of(self, spec: SandboxSpec) -> str:
        image = self.choose(spec).image
        assert image is not None
        return image

    def destroy(self, handle: str) -> None:
        self.end_containers(handle)
        self._folders.destroy(handle)
        # Containers that were made meanwhile: their note is here by now, or they see that the folder is gone.
        self.end_containers(handle)

    def end_containers(self, handle: str) -> None:
        """Remove all containers of a sandbox, whatever engine they are of. Raises EpisodeError."""
        for record in self.records.of(handle):
            engine = self.engine if record.url == self.engine.url else ContainerEngine(record.url)
            try:
                record.end(engine)
            finally:
                if engine is not self.engine:
                    engine.close()

    def sweep(self) -> None:
        self.records.sweep(self.engine)

    def close(self) -> None:
        """End the threads and connections."""
        self._threads.shutdown()
        self.engine.close()

    def _server(self, handle: str, image: str, *, is_wanted: Callable[[], bool]) -> ContainerServer:
        record = self.records.fresh(handle, self.engine.url)
        return ContainerServer(
            self.engine,
            self._threads,
            self._gate,
            record=record,
            make=lambda: self._make(record.name, handle, image),
            image=image,
            greeting=self._greeting,
            limits=self._limits,
            is_wanted=is_wanted,
        )

    def _make(self, name: str, handle: str, image: str) -> str:
        facts = self.engine.facts()
        if facts.is_podman and self._runtime is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"{facts.name} takes no runtime over its service, and would not use {self._runtime}: unset "
                "ROLLMILL_SANDBOX_RUNTIME, or use Docker Engine",
            )
        file = self._profile_file(facts) if facts.is_podman else None
        host = host_options(self._limits, facts, runtime=self._runtime, profile_file=file)
        return self.engine.create(name, image, host=host, **process_options(self.records.labels(handle)))

    def _profile_file(self, facts: EngineFacts) -> Path:
        """The list of system calls where Podman reads it."""
        file = self._folders.root.parent / "sandbox-seccomp.json"
        fresh = file.with_name(f".{file.name}.{threading.get_ident()}")
        fresh.write_text(profile(facts.machine))
        fresh.chmod(0o644)
        fresh.rename(file)
        return file

    def _greeting(self, folder: Path) -> bytes:
        """The task's files and the command server's program. RUN alone has touched the folder: it holds no links."""
        files = {
            str(file.relative_to(folder)): file.read_bytes().decode()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        # gVisor's kernel is its own, and shows none of the host's control groups and filters.
        walls = {"memory_bytes": memory_bytes(self._limits), "num_processes": num_processes(self._limits)}
        is_podman = self.engine.facts().is_podman
        given = {
            "folders": [*DISKS, STATE],
            "walls": None if self._runtime == GVISOR else walls,
            "files": files,
            "server": server_source().decode(),
            "config": server_config(
                self._limits, state_folder=STATE, disks=DISKS, kernel_processes=0, counts_files=is_podman
            ),
        }
        return json.dumps(given).encode()
