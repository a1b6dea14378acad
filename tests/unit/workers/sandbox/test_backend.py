from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.config import SandboxConfig
from common.errors import SetupError
from common.settings import Settings, load_settings
from workers.sandbox import open_backend
from workers.sandbox.backend import FolderBackend
from workers.sandbox.protocol import OPEN, SandboxSpec


def test_walls_are_used_where_they_stand(
    bubblewrap: FolderBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_backend(Settings(data_dir=tmp_path)).choose(OPEN) == SandboxSpec(kind="bubblewrap")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_without_bubblewrap_one_loud_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        backend = open_backend(Settings(data_dir=tmp_path))
    assert backend.choose(OPEN) == SandboxSpec(kind="subprocess")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NO SANDBOX: bubblewrap is not installed" in caplog.text
    assert "apt-get install bubblewrap" in caplog.text


def test_an_image_of_the_node_asks_for_docker(tmp_path: Path) -> None:
    given = Settings(data_dir=tmp_path, sandbox_image="python:3.12", docker_url="unix:///nowhere/sock")
    assert open_backend(given).choose(OPEN).kind == "docker"


def test_an_unknown_kind_is_refused_with_the_names_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "'bubblewrap', 'docker', 'apptainer' or 'subprocess'"
    monkeypatch.setenv("ROLLMILL_SANDBOX", "firejail")
    with pytest.raises(SetupError, match=f"ROLLMILL_SANDBOX='firejail': .* 'auto', {names}$"):
        load_settings()
    with pytest.raises(ValidationError, match=names):
        SandboxConfig.model_validate({"kind": "firejail"})


def test_the_name_that_subprocess_once_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_SANDBOX", "restricted")
    assert load_settings().sandbox == "subprocess"
    assert SandboxConfig.model_validate({"kind": "restricted"}).kind == "subprocess"
    assert SandboxSpec.model_validate({"kind": "restricted"}).kind == "subprocess"


async def test_a_sandbox_is_found_by_another_process(bubblewrap: FolderBackend, limited: FolderBackend) -> None:
    handle = bubblewrap.handle(12, 3)
    bubblewrap.create(handle, {"a": "x"})
    session = limited.attach(handle)
    assert (await session.exec("cat a", timeout_s=20)).output == "x"
    await session.close()
    limited.destroy(handle)
