"""A backend of each kind. Where one can't be had, its tests fail in CI and are skipped, and counted, on a laptop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from common.config_network import NetworkConfig
from tests.unit.workers.sandbox import engines
from tests.unit.workers.sandbox.engines import Engine
from workers.run_loop import RunLoop
from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.container_records import DATA_DIR
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Backend, Limits, SandboxSession, SandboxSpec
from workers.sandbox.restricted import Restricted

HANDLE = "7-1"
WALLED = ("bubblewrap", "docker", "podman")
_passed: Counter[str] = Counter()
_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()
"""Of kinds that can't be had here; the report above says why."""
FILES = {"notes.txt": "hello\n", "data/maple12": "code 42\n"}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count cases of robustness, attacks and cheats, of whichever process ran them."""
    if report.when == "call" or report.outcome != "passed":
        for mark in ("robustness", "attack", "cheat"):
            if mark in report.keywords:
                _ran[mark] += report.outcome != "skipped"
                _skipped[mark] += report.outcome == "skipped"
                _passed[mark] += report.outcome == "passed"


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of `make test-sandbox`."""
    if os.environ.get("SANDBOX_FIGURES") and not hasattr(config, "workerinput"):
        sys.stdout.write(
            f"sandbox: cases={_passed['robustness']} attacks={_ran['attack']} stopped={_passed['attack']} "
            f"cheats={_ran['cheat']} caught={_passed['cheat']} "
            f"skipped={_skipped.total()}\n"
        )


@pytest.fixture
def folders(tmp_path: Path) -> SandboxFolders:
    return SandboxFolders.below(tmp_path)


def _without(reason: str) -> NoReturn:
    """Fails the test in CI, and skips it on a laptop."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def bubblewrap(folders: SandboxFolders) -> FolderBackend:
    """Bubblewrap's walls."""
    folders.create("0-1", {})
    trouble = Bubblewrap().trouble(folders.path("0-1"))
    folders.destroy("0-1")
    if trouble is not None:
        _without(trouble)
    return FolderBackend(folders, Bubblewrap())


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A Docker Engine of our own."""
    yield from _engine("docker", tmp_path_factory.mktemp("docker"))


@pytest.fixture(scope="session")
def podman_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A Podman service of our own."""
    yield from _engine("podman", tmp_path_factory.mktemp("podman"))


def _engine(kind: str, folder: Path) -> Iterator[Engine]:
    if reason := engines.missing(kind):
        _without(reason)
    with engines.started(kind, folder) as engine:
        yield engine


@pytest.fixture
def docker(folders: SandboxFolders, docker_engine: Engine) -> Iterator[Containers]:
    """Docker's walls."""
    yield from containers(folders, docker_engine)


@pytest.fixture
def podman(folders: SandboxFolders, podman_engine: Engine) -> Iterator[Containers]:
    """Podman's walls."""
    yield from containers(folders, podman_engine)


def containers(folders: SandboxFolders, engine: Engine, limits: Limits | None = None) -> Iterator[Containers]:
    """The backend for an engine, with its image; nothing is left of its containers."""
    made = Containers(folders, engine.client, image=engine.agent, pull="never", limits=limits)
    image = made.engine.image(engine.agent, pull="never").id
    made._proven |= {image, f"{image} proxy"}
    yield made
    left = made.engine.ours([f"{DATA_DIR}={folders.root.parent}"])
    made.close()
    assert left == []


@pytest.fixture(params=WALLED)
def walled(request: pytest.FixtureRequest) -> Backend:
    """Each kind with walls in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def limited(folders: SandboxFolders) -> FolderBackend:
    """The backend without walls."""
    return FolderBackend(folders, Restricted())


@pytest.fixture(params=["bubblewrap", "limited"])
def backend(request: pytest.FixtureRequest) -> FolderBackend:
    """Each kind that is a process of ours in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, FolderBackend)
    return found


@pytest.fixture(params=[*WALLED, "limited"])
def any_backend(request: pytest.FixtureRequest) -> Backend:
    """Each kind in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
async def session(any_backend: Backend) -> AsyncIterator[SandboxSession]:
    """A sandbox with FILES, of each kind in turn."""
    await asyncio.to_thread(any_backend.create, HANDLE, FILES)
    opened = any_backend.attach(HANDLE)
    yield opened
    await opened.close()


@pytest.fixture
async def session_with_loopback(walled: Backend) -> AsyncIterator[SandboxSession]:
    """A sandbox with walls and IP: an attack on other networks must not fail for want of a socket alone."""
    spec = await asyncio.to_thread(walled.choose, SandboxSpec(network=NetworkConfig(mode="loopback")))
    await asyncio.to_thread(walled.create, HANDLE, {}, spec)
    opened = walled.attach(HANDLE, spec)
    yield opened
    await opened.close()


@pytest.fixture
async def walled_session(walled: Backend) -> AsyncIterator[SandboxSession]:
    """A sandbox with FILES and walls."""
    await asyncio.to_thread(walled.create, HANDLE, FILES)
    opened = walled.attach(HANDLE)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def judging_loop() -> Iterator[RunLoop]:
    """On which evaluators' sandboxes live."""
    made = RunLoop()
    yield made
    made.close()
