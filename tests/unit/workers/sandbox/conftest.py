"""A backend of each kind. Without bubblewrap its tests fail in CI and are skipped on a laptop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import SandboxSession
from workers.sandbox.restricted import Restricted

HANDLE = "7-1"
FILES = {"notes.txt": "hello\n", "data/maple12": "code 42\n"}


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
