"""A backend of each kind. Without bubblewrap its tests fail in CI and are skipped on a laptop."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import SandboxSession
from workers.sandbox.restricted import Restricted

HANDLE = "7-1"
_passed: Counter[str] = Counter()
_ran: Counter[str] = Counter()
FILES = {"notes.txt": "hello\n", "data/maple12": "code 42\n"}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Count cases of robustness and attacks."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" or report.outcome != "passed":
        for mark in ("robustness", "attack"):
            if item.get_closest_marker(mark):
                _ran[mark] += 1
                _passed[mark] += report.outcome == "passed"


def pytest_unconfigure() -> None:
    """The last line of `make test-sandbox`."""
    if os.environ.get("SANDBOX_FIGURES"):
        sys.stdout.write(
            f"sandbox: cases={_passed['robustness']} attacks={_ran['attack']} stopped={_passed['attack']}\n"
        )


@pytest.fixture
def folders(tmp_path: Path) -> SandboxFolders:
    return SandboxFolders.below(tmp_path)


@pytest.fixture
def walled(folders: SandboxFolders) -> FolderBackend:
    """The backend with walls."""
    folders.create("0-1", {})
    trouble = Bubblewrap().trouble(folders.path("0-1"))
    folders.destroy("0-1")
    if trouble is not None:
        if os.environ.get("CI"):
            pytest.fail(trouble)
        pytest.skip(trouble)
    return FolderBackend(folders, Bubblewrap())


@pytest.fixture
def limited(folders: SandboxFolders) -> FolderBackend:
    """The backend without walls."""
    return FolderBackend(folders, Restricted())


@pytest.fixture(params=["walled", "limited"])
def backend(request: pytest.FixtureRequest) -> FolderBackend:
    """Each kind in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, FolderBackend)
    return found


@pytest.fixture
async def session(backend: FolderBackend) -> AsyncIterator[SandboxSession]:
    """A sandbox with FILES, of each kind in turn."""
    backend.create(HANDLE, FILES)
    opened = backend.attach(HANDLE)
    yield opened
    await opened.close()


@pytest.fixture
async def walled_session(walled: FolderBackend) -> AsyncIterator[SandboxSession]:
    """A sandbox with FILES and walls."""
    walled.create(HANDLE, FILES)
    opened = walled.attach(HANDLE)
    yield opened
    await opened.close()
