"""Docker Engine, or Podman's service, which speaks the same: images, and containers from their start to their end.

What it refuses becomes EpisodeError(SANDBOX_FAILED) with the engine's words and what to do. All calls block.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from common.errors import EpisodeError
from common.outcomes import Outcome

Pull = Literal["missing", "always", "never"]
ANSWER_TIMEOUT_S = 60
"""For one request; pulling an image may be silent for as long."""
REMOVE_WAIT_S, REMOVE_POLL_S = 10.0, 0.05
REACH_TIMEOUT_S = 5.0
NUM_CONNECTIONS = 16
EVENTS_WAIT_S = 2.0
"""The engine may note an end a moment after it."""
OUT_OF_MEMORY_S = 2.0
"""Between the kernel's note that memory was short and the end of a process that it chose."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the engine is."""

    name: str
    """Docker or Podman, and its version."""
    is_podman: bool
    is_rootless: bool
    cgroup_version: str
    num_cpus: int
    machine: str
    """Of its processors, as `uname -m`."""
    runtimes: tuple[str, ...]
    disk: str
    """Storage driver and folder."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image that the engine has."""

    id: str
    volumes: tuple[str, ...]
    """Folders that it declares as volumes."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """A container of ours, running or not."""

    id: str
    labels: Mapping[str, str]


class ContainerEngine:
    """One engine by its address. Connects at the first call, and anew after it did not answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._connected: docker.APIClient | None = None
        self._facts: EngineFacts | None = None
        self._pulled: set[str] = set()
        """Images that `always` has pulled: once a process."""

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            client.close()

    def facts(self) -> EngineFacts:
        """Asked for once, since Podman takes seconds to say so, and anew after it did not answer.

        Raises EpisodeError.
        """
        if self._facts is None:
            self._facts = self._ask()
        return self._facts

    def _ask(self) -> EngineFacts:
        with self._told("its description"):
            client = self._client()
            version, info = client.version(), client.info()
        parts = [str(part.get("Name", "")) for part in version.get("Components") or ()]
        is_podman = any("podman" in part.lower() for part in parts)
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        return EngineFacts(
            name=f"{'Podman' if is_podman else 'Docker'} {version.get('Version')}",
            is_podman=is_podman,
            is_rootless=any("rootless" in option for option in options),
            cgroup_version=str(info.get("CgroupVersion") or "?"),
            num_cpus=int(info.get("NCPU") or 1),
            machine=str(info.get("Architecture") or "").replace("amd64", "x86_64").replace("arm64", "aarch64"),
            runtimes=tuple(sorted(info.get("Runtimes") or {})),
            disk=f"{info.get('Driver')} in {info.get('DockerRootDir')}",
        )

    def image(self, name: str, *, pull: Pull) -> Image:
        """The image, pulled where it may be. Raises EpisodeError that says how to get it."""
        found = None if pull == "always" and name not in self._pulled else self._inspect(name)
        if found is None and pull == "never":
            raise self._failed(
                f"has no image {name}: load it there (docker pull, docker load), or set ROLLMILL_SANDBOX_PULL=missing"
            )
        if found is None:
            self._pull(name)
            found = self._inspect(name)
        if found is None:
            raise self._failed(f"has no image {name} although it was pulled: is its disk full, or is it being pruned?")
        self._pulled.add(name)
        return Image(id=str(found["Id"]), volumes=tuple(sorted((found.get("Config") or {}).get("Volumes") or ())))

    def _inspect(self, name: str) -> dict[str, Any] | None:
        with self._told(f"image {name}"):
            try:
                return dict(self._client().inspect_image(name))  # type: ignore[no-untyped-call]  # its stubs say so
            except NotFound:
                return None

    def _pull(self, name: str) -> None:
        remedy = "check the name and the way to its registry, or load it there, and set ROLLMILL_SANDBOX_PULL=never"
        try:
            with self._told(f"pulling {name}"):
                for said in self._client().pull(name, stream=True, decode=True):
                    if "error" in said:
                        raise self._failed(f"cannot pull image {name}: {said['error']}: {remedy}")
        except EpisodeError as error:
            raise (
                error if remedy in error.detail else self._failed(f"cannot pull image {name}: {error.detail}: {remedy}")
            ) from error

    def create(self, name: str, image: str, *, host: Mapping[str, Any], **options: Any) -> str:
        """Make a container, not started; its id. Raises EpisodeError."""
        with self._told(f"making a container of image {image}"):
            client = self._client()
            made = client.create_container(image, name=name, host_config=client.create_host_config(**host), **options)
            return str(made["Id"])

    def attach(self, container: str) -> socket.socket:
        """Its standard input and outputs, before it is started: nothing has been written yet. Raises EpisodeError."""
        with self._told("a connection to a container"):
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            attached = self._client().attach_socket(container, params=streams)
            # A copy, since the library's own goes with its response, and back into its pool.
            stream = socket.socket(fileno=os.dup(attached.fileno()))
            attached._response.close()
            return stream

    def start(self, container: str, image: str) -> None:
        """Raises EpisodeError."""
        with self._told(f"starting a container of image {image}"):
            self._client().start(container)

    def remove(self, container: str) -> None:
        """End it and all in it, and wait until it is gone; nothing if it is. Raises EpisodeError."""
        deadline = time.monotonic() + REMOVE_WAIT_S
        with self._told(f"removing container {container}"):
            while True:
                try:
                    self._client().remove_container(container, force=True, v=True)
                except NotFound:
                    return
                except APIError:
                    # An engine that removes it already, since it ended, refuses in words of its own.
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(REMOVE_POLL_S)

    def ours(self, labels: Sequence[str]) -> list[Container]:
        """Containers with all these labels. Raises EpisodeError."""
        with self._told("a list of containers"):
            found = self._client().containers(all=True, filters={"label": list(labels)})
        return [Container(id=str(each["Id"]), labels=dict(each.get("Labels") or {})) for each in found]

    def died_of_memory(self, container: str, *, since: float) -> bool:
        """Whether the kernel killed its first process at the container's limit of memory; it may be gone by now.

        `since` in seconds of Unix time. Only Docker notes it. Raises EpisodeError.
        """
        if self.facts().is_podman:
            return False
        asked = {"container": [container], "event": ["oom", "die"]}
        seconds = {"since": int(since), "until": int(time.time() + EVENTS_WAIT_S)}
        last_oom = -math.inf
        with self._told("what befell a container"):
            events = self._client().events(**seconds, filters=asked, decode=True)
            try:
                for event in events:
                    at = event["timeNano"] / 1e9
                    if event.get("Action") == "oom":
                        last_oom = at
                    elif event["Actor"]["Attributes"].get("exitCode") == str(128 + signal.SIGKILL):
                        return bool(at - last_oom < OUT_OF_MEMORY_S)
            finally:
                events.close()
        return False

    def _client(self) -> docker.APIClient:
        with self._lock:
            if self._connected is None:
                _reach(self.url)
                self._connected = docker.APIClient(
                    base_url=self.url, version="auto", timeout=ANSWER_TIMEOUT_S, num_pools=NUM_CONNECTIONS
                )
            return self._connected

    def _failed(self, what: str) -> EpisodeError:
        return EpisodeError(Outcome.SANDBOX_FAILED, f"the container engine at {self.url} {what}")

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What goes wrong, in words for the person who can mend it."""
        try:
            yield
        except APIError as error:
            raise self._failed(_explained(what, str(error.explanation or error))) from error
        except requests.exceptions.ReadTimeout as error:
            raise self._failed(
                f"gave no answer about {what} within {ANSWER_TIMEOUT_S} s: it is overloaded or hangs"
            ) from error
        except (requests.exceptions.RequestException, DockerException, OSError) as error:
            self.close()
            self._facts = None
            if "Permission denied" in str(error):
                raise self._failed("may not be used by this user: put it into the engine's group (docker)") from error
            raise self._failed(
                "does not answer: start it (systemctl start docker, or podman.socket), or set ROLLMILL_DOCKER_URL "
                f"({error!s:.200})"
            ) from error


def _reach(url: str) -> None:
    """See that somebody listens: the library leaves a socket open where nobody does. Raises OSError."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(REACH_TIMEOUT_S)
            probe.connect(url.removeprefix("unix://"))


def _explained(what: str, said: str) -> str:
    """The engine's words about a request, and the remedy where it is known."""
    remedies = {
        "no space left": "its disk is full: free room where it keeps its data (docker system prune)",
        'python3": executable file not found': "the image has no python3, which runs the command server: add it",
        "python3: no such file": "the image has no python3, which runs the command server: add it",
        "`python3` not found": "the image has no python3, which runs the command server: add it",
        "no such image": "the image was removed after the episode was prepared",
        "unknown or invalid runtime": "set ROLLMILL_SANDBOX_RUNTIME to one that the engine has",
    }
    for sign, remedy in remedies.items():
        if sign.lower() in said.lower():
            return f"refuses {what}: {remedy} ({said:.300})"
    return f"refuses {what}: {said:.600}"
