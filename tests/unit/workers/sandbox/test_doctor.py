from __future__ import annotations

from pathlib import Path

import pytest

from common.settings import Settings
from tests.unit.workers.sandbox.engines import Engine
from workers.sandbox.backend import FolderBackend
from workers.sandbox.doctor import backends, main, node


def test_walls_that_stand(bubblewrap: FolderBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data-dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for word in ("bubblewrap", "subprocess", "user namespaces", "control groups", "seccomp", "gVisor", "walls here"):
        assert word in printed
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_without_bubblewrap_it_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", "/nowhere")
    bubblewrap, docker, _, subprocess = backends(Settings(data_dir=tmp_path, docker_url="unix:///nowhere/sock"))
    assert bubblewrap.state == "does not work: bubblewrap is not installed"
    assert bubblewrap.remedy.startswith("apt-get install bubblewrap")
    assert docker.state == "does not work"
    assert "start it" in docker.remedy
    assert subprocess.state == "works, used"
    assert main(["--data-dir", str(tmp_path)]) == 1
    assert "NO WALLS" in capsys.readouterr().out


def test_a_data_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--data-dir", str(tmp_path / "file")]) == 2
    assert "ROLLMILL_DATA_DIR" in capsys.readouterr().err


def test_a_folder_of_control_groups_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_SANDBOX_CGROUP", "/nonexist")
    assert main(["--data-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rollmill sandbox doctor: ROLLMILL_SANDBOX_CGROUP: /nonexist")
    assert said.count("\n") == 1


@pytest.mark.parametrize("named", [{"ROLLMILL_SANDBOX": "docker"}, {"ROLLMILL_SANDBOX_IMAGE": "python:3.12"}])
def test_where_the_kind_that_was_asked_for_does_not_work_nothing_would_run(
    named: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**named, "ROLLMILL_DOCKER_URL": "unix:///nowhere/sock", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    verdict = printed.splitlines()[-1]
    assert verdict.startswith("nothing would run: docker: does not work; ")
    assert "/nowhere/sock" in verdict
    assert "NO WALLS here" not in printed
    # Nothing of the tables is cut: what is to be typed stands there, if in pieces.
    assert "…" not in printed


def test_every_part_of_the_node_has_a_state() -> None:
    assert all(finding.state and finding.means for finding in node(Settings()))


@pytest.mark.robustness
def test_an_engine_is_tried_with_an_image(docker_engine: Engine, tmp_path: Path) -> None:
    given = Settings(data_dir=tmp_path, docker_url=docker_engine.client.url, sandbox_image=docker_engine.agent)
    docker = {finding.name: finding for finding in backends(given)}["docker"]
    assert docker.state.startswith("works: Docker ")
    assert "control groups v" in docker.state
    assert docker.remedy == ""
