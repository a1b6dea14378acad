"""The sandboxes of a node, of each kind: chosen by the task, else its run, else the node's settings."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from common.config import SandboxKind
from common.config_network import NetworkConfig
from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from common.settings import Settings
from workers.sandbox.apptainer_images import ApptainerImages
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.cgroup import find_groups
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.process_server import ProcessServer, Walls
from workers.sandbox.protocol import NO_NETWORK, OPEN, Backend, SandboxSession, SandboxSpec
from workers.sandbox.restricted import Restricted
from workers.sandbox.session import Session

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0


@runtime_checkable
class Networked(Protocol):
    """Walls that have a network of their own."""

    def joined(self, network: NetworkConfig) -> Walls:
        """The same walls with this network."""
        ...


class FolderBackend:
    """The backend for any kind of walls: another process may use other walls around the same folder."""

    def __init__(self, folders: SandboxFolders, walls: Walls) -> None:
        self._folders = folders
        self._walls = walls

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        if spec.image is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"image {spec.image} is of no use to {self._walls.name}: set ROLLMILL_SANDBOX=docker, or sandbox.kind "
                "of the run",
            )
        self._within(spec.network)
        return spec.model_copy(update={"kind": self._walls.name})

    def _within(self, network: NetworkConfig) -> Walls:
        """The walls with this network. Raises EpisodeError where they have no such thing."""
        if network == NO_NETWORK:
            return self._walls
        if not isinstance(self._walls, Networked):
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f'{self._walls.name} cannot keep to [sandbox.network] mode = "{network.mode}": set '
                "ROLLMILL_SANDBOX=bubblewrap or docker, or sandbox.kind of the run",
            )
        return self._walls.joined(network)

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        self._folders.create(handle, files)

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        self._folders.require(handle)
        walls = self._within(spec.network)
        server = lambda: ProcessServer(walls, self._folders, handle, spec)  # noqa: E731
        return Session(self._folders, handle, server, lifetime_s=spec.lifetime_s)

    def destroy(self, handle: str) -> None:
        self._folders.destroy(handle)

    def sweep(self) -> None:
        self._folders.owners.sweep()


class NodeBackend:
    """All kinds of sandboxes; one that nobody asks for is not opened."""

    def __init__(self, folders: SandboxFolders, given: Settings) -> None:
        self._folders = folders
        self._settings = given
        self._lock = threading.Lock()
        self._opened: dict[tuple[SandboxKind, str], Backend] = {}
        self._next_sweep = 0.0
        self.default: SandboxKind = self._usual() if given.sandbox == "auto" else given.sandbox
        """The kind where nobody names one."""

    def _usual(self) -> SandboxKind:
        if self._settings.sandbox_image is not None:
            return "docker"
        trouble = self._trouble()
        if trouble is None:
            return "bubblewrap"
        logger.warning(
            "NO SANDBOX: %s. Commands of agents run with your files and your network in reach. Install bubblewrap "
            "(Debian: apt-get install bubblewrap) before you let an agent that you do not trust run commands",
            trouble,
        )
        return "subprocess"

    def _trouble(self) -> str | None:
        probe = f"0-{os.getpid()}"  # no episode has number 0
        self._folders.create(probe, {})
        try:
            return Bubblewrap().trouble(self._folders.path(probe))
        finally:
            self._folders.destroy(probe)

    def check(self) -> None:
        """See at the start that the kind of the settings can work. Raises SetupError."""
        if self._settings.sandbox_cgroup is not None:
            find_groups(self._settings.sandbox_cgroup)
        if self._settings.sandbox == "bubblewrap" and (trouble := self._trouble()) is not None:
            raise SetupError(f"ROLLMILL_SANDBOX=bubblewrap: {trouble}; see rollmill sandbox doctor")
        if self._settings.sandbox == "subprocess":
            _warn("ROLLMILL_SANDBOX=subprocess")

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        kind = spec.kind or ("docker" if spec.image is not None and self._settings.sandbox == "auto" else self.default)
        return self._of(kind).choose(spec)

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        self._of(spec.kind or self.default, spec.endpoint).create(handle, files, spec)

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        return self._of(spec.kind or self.default, spec.endpoint).attach(handle, spec)

    def destroy(self, handle: str) -> None:
        # Whatever kind it is: records say what belongs to it.
        containers = self._containers()
        (self._folders if containers is None else containers).destroy(handle)

    def sweep(self) -> None:
        """At most every SWEEP_EVERY_S."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_EVERY_S
        for handle in self._folders.forgotten_evaluations():
            self.destroy(handle)
        try:
            self._folders.owners.sweep()
        finally:
            containers = self._containers()
            if containers is not None:
                containers.sweep()

    def _containers(self) -> Backend | None:
        """Where containers have been used with this data folder."""
        return self._of("docker") if (self._folders.root.parent / "sandbox-containers").is_dir() else None

    def _of(self, kind: SandboxKind, endpoint: str | None = None) -> Backend:
        """`endpoint`: the engine's that INIT chose, on whatever node that was."""
        url = endpoint or self._settings.docker_url
        with self._lock:
            if (kind, url) not in self._opened:
                self._opened[kind, url] = self._open(kind, url)
            return self._opened[kind, url]

    def _open(self, kind: SandboxKind, docker_url: str) -> Backend:
        if kind == "docker":
            given = self._settings
            return Containers(
                self._folders,
                ContainerEngine(docker_url),
                image=given.sandbox_image,
                pull=given.sandbox_pull,
                runtime=given.sandbox_runtime,
                num_starts=given.sandbox_starts,
            )
        if kind == "apptainer":
            return ApptainerImages(self._folders, image=self._settings.sandbox_image)
        if kind == "subprocess" and self.default != "subprocess":
            _warn("a run's sandbox.kind")
        return FolderBackend(self._folders, Restricted() if kind == "subprocess" else self._bubblewrap())

    def _bubblewrap(self) -> Bubblewrap:
        # The node's own kind has been tried when it was chosen; a run may want another.
        trouble = None if self.default == "bubblewrap" else self._trouble()
        if trouble is not None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"the run's sandbox.kind is bubblewrap, but {trouble} on {socket.gethostname()}: see rollmill sandbox "
                "doctor there",
            )
        groups = find_groups(self._settings.sandbox_cgroup)
        if isinstance(groups, str):
            logger.info(
                "no control groups for sandboxes: %s. Their servers watch memory and count processes (rlimits); "
                "rollmill sandbox doctor says how to get them",
                groups,
            )
            return Bubblewrap()
        return Bubblewrap(groups=groups)


def _warn(why: str) -> None:
    logger.warning(
        "NO SANDBOX: %s asks for commands without walls, with your files and your network in reach. Only for commands "
        "that you trust",
        why,
    )


def open_backend(given: Settings) -> NodeBackend:
    """The node's sandboxes, below its data folder. Raises SetupError for a kind that was named and can't work."""
    backend = NodeBackend(SandboxFolders.below(given.data_dir), given)
    backend.check()
    return backend
