from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.settings import Settings
from workers.sandbox import open_backend
from workers.sandbox.backend import FolderBackend
from workers.sandbox.protocol import OPEN, SandboxSpec


def test_walls_are_used_where_they_stand(
    bubblewrap: FolderBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_backend(Settings(data_dir=tmp_path)).choose(OPEN) == SandboxSpec(kind="bubblewrap")
    assert not caplog.records
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_without_bubblewrap_one_loud_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        backend = open_backend(Settings(data_dir=tmp_path))
    assert backend.choose(OPEN) == SandboxSpec(kind="restricted")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NO SANDBOX: bubblewrap is not installed" in caplog.text
    assert "apt-get install bubblewrap" in caplog.text


async def test_a_sandbox_is_found_by_another_process(bubblewrap: FolderBackend, limited: FolderBackend) -> None:
    handle = bubblewrap.handle(12, 3)
    bubblewrap.create(handle, {"a": "x"})
    session = limited.attach(handle)
    assert (await session.exec("cat a", timeout_s=20)).output == "x"
    await session.close()
    limited.destroy(handle)
