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

from common.config_network import NetworkConfig
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox import proxy_socket
from workers.sandbox.client import ServerLost
from workers.sandbox.container_engine import ContainerEngine, EngineFacts, Image, Pull
from workers.sandbox.container_options import (
    DISKS,
    PROXY,
    STATE,
    host_options,
    memory_bytes,
    num_processes,
    process_options,
)
from workers.sandbox.container_records import ContainerRecord, ContainerRecords
from workers.sandbox.container_server import ContainerServer
from workers.sandbox.egress_proxy import EgressProxy
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.launching import server_config, task_files
from workers.sandbox.protocol import NO_NETWORK, OPEN, Limits, SandboxSession, SandboxSpec
from workers.sandbox.seccomp_profile import profile
from workers.sandbox.server_text import server_text
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
        self._see_that_proxies_work(spec.network)
        return spec.model_copy(update={"kind": "docker", "image": image, "endpoint": shared_endpoint(self.engine.url)})

    def _see_that_proxies_work(self, network: NetworkConfig) -> None:
        if network.mode != "proxy":
            return
        why = None
        if not self.engine.url.startswith("unix://"):
            why = f"the engine at {self.engine.url} is elsewhere: take one on the worker's machine (unix://...)"
        if self._runtime == GVISOR:
            why = "gVisor hands no sockets over: unset ROLLMILL_SANDBOX_RUNTIME"
        if why is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED, f'[sandbox.network] mode = "proxy" cannot be had: {why}, or take bubblewrap'
            )

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        self.prove(self._image_of(spec), spec.network)
        if spec.endpoint is None:
            self._folders.create(handle, files)

    def prove(self, name: str, network: NetworkConfig = NO_NETWORK) -> Image:
        """Get the image, and start one container of it, the first time. Raises EpisodeError that says what to do.

        Once more for a proxy, which has a way to go of its own.
        """
        image = self.engine.image(name, pull=self._pull)
        if image.volumes:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"image {name} declares volumes, which no limit holds: build it without {', '.join(image.volumes)}",
            )
        with self._lock:
            if (proven := f"{image.id} proxy" if network.mode == "proxy" else image.id) not in self._proven:
                asyncio.run(self._probe(name, network))
                self._proven.add(proven)
        return image

    async def _probe(self, name: str, network: NetworkConfig) -> None:
        server = self._server(PROBE, SandboxSpec(kind="docker", image=name, network=network), is_wanted=lambda: True)
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
        chosen = spec.model_copy(update={"image": self._image_of(spec)})
        wanted = lambda: self._folders.exists(handle)  # noqa: E731
        server = lambda: self._server(handle, chosen, is_wanted=wanted)  # noqa: E731
        return Session(self._folders, handle, server, lifetime_s=spec.lifetime_s)

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

    def _server(self, handle: str, spec: SandboxSpec, *, is_wanted: Callable[[], bool]) -> ContainerServer:
        assert spec.image is not None
        record = self.records.fresh(handle, self.engine.url)
        return ContainerServer(
            self.engine,
            self._threads,
            self._gate,
            record=record,
            make=lambda: self._make(record, handle, spec),
            image=spec.image,
            greeting=lambda folder: self._greeting(folder, spec.network),
            limits=self._limits,
            is_wanted=is_wanted,
            proxy=EgressProxy(spec.network, handle=handle) if spec.network.mode == "proxy" else None,
        )

    def _make(self, record: ContainerRecord, handle: str, spec: SandboxSpec) -> str:
        assert spec.image is not None
        facts = self.engine.facts()
        if facts.is_podman and self._runtime is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"{facts.name} takes no runtime over its service, and would not use {self._runtime}: unset "
                "ROLLMILL_SANDBOX_RUNTIME, or use Docker Engine",
            )
        has_proxy = spec.network.mode == "proxy"
        host = host_options(
            self._limits,
            facts,
            runtime=self._runtime,
            profile=self._profile(facts, has_ip=spec.network.mode != "none"),
            proxy_folder=record.proxy_folder if has_proxy else None,
        )
        options = process_options(self.records.labels(handle, lifetime_s=spec.lifetime_s), has_proxy=has_proxy)
        return self.engine.create(record.name, spec.image, host=host, **options)

    def _profile(self, facts: EngineFacts, *, has_ip: bool) -> str:
        """The list of system calls; for Podman the file in which it reads it."""
        text = profile(facts.machine, has_ip=has_ip)
        if not facts.is_podman:
            return text
        file = self._folders.root.parent / f"sandbox-seccomp-{'ip' if has_ip else 'no-ip'}.json"
        fresh = file.with_name(f".{file.name}.{threading.get_ident()}")
        fresh.write_text(text)
        fresh.chmod(0o644)
        fresh.rename(file)
        return str(file)

    def _greeting(self, folder: Path, network: NetworkConfig) -> bytes:
        """The task's files and the command server's program."""
        # gVisor's kernel is its own, and shows none of the host's control groups and filters.
        walls = {"memory_bytes": memory_bytes(self._limits), "num_processes": num_processes(self._limits)}
        is_podman = self.engine.facts().is_podman
        given = {
            "folders": [*DISKS, STATE],
            "walls": None if self._runtime == GVISOR else walls,
            "files": task_files(folder),
            "server": server_text().decode(),
            "config": server_config(
                self._limits,
                state_folder=STATE,
                disks=DISKS,
                kernel_processes=0,
                counts_files=is_podman,
                lend=(proxy_socket.PORT, f"{PROXY}/{proxy_socket.SOCKET_NAME}") if network.mode == "proxy" else None,
            ),
        }
        return json.dumps(given).encode()
