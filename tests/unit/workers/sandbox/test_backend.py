from __future__ import annotations

import logging
from pathlib import Path

import pytest

from workers.sandbox import open_backend
from workers.sandbox.backend import FolderBackend


def test_walls_are_used_where_they_stand(
    walled: FolderBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_backend(tmp_path).name == walled.name == "bubblewrap"
    assert not caplog.records
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_without_bubblewrap_one_loud_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        backend = open_backend(tmp_path)
    assert backend.name == "restricted"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NO SANDBOX: bubblewrap is not installed" in caplog.text
    assert "apt-get install bubblewrap" in caplog.text


async def test_a_sandbox_is_found_by_another_process(walled: FolderBackend, limited: FolderBackend) -> None:
    handle = walled.handle(12, 3)
    walled.create(handle, {"a": "x"})
    session = limited.attach(handle)
    assert (await session.exec("cat a", timeout_s=20)).output == "x"
    await session.close()
    limited.destroy(handle)
