"""Apptainer's command line, and the whole way with a program that plays Apptainer: a real one is not to be had here."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import EpisodeError
from common.settings import Settings
from tests.unit.workers.sandbox import played_apptainer
from tests.unit.workers.sandbox.conftest import FILES, HANDLE
from workers.sandbox import open_backend
from workers.sandbox.apptainer import command_line
from workers.sandbox.apptainer_images import ApptainerImages
from workers.sandbox.backend import FolderBackend
from workers.sandbox.doctor import backends
from workers.sandbox.file_requests import ViewFile
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Limit, Limits, SandboxSpec

LIMITS = Limits(memory_bytes=100 << 20, num_processes=30, num_inodes=300)


@pytest.fixture
def program(bubblewrap: FolderBackend, tmp_path: Path) -> Path:
    """Plays Apptainer."""
    copy = tmp_path / "bin" / "apptainer"
    copy.parent.mkdir()
    shutil.copy(played_apptainer.__file__, copy)
    copy.chmod(0o755)
    return copy


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Whatever it holds, the program shows its own machine's /usr."""
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "python3").write_text("")
    return folder


@pytest.fixture
def images(folders: SandboxFolders, program: Path, image: Path) -> Iterator[ApptainerImages]:
    made = ApptainerImages(folders, image=str(image), program=str(program))
    yield made
    made.destroy(HANDLE)


def test_everything_that_apptainer_shares_is_turned_off(tmp_path: Path) -> None:
    line = command_line("/opt/apptainer", Path("/images/a.sif"), LIMITS, cgroups=tmp_path)
    assert line[:-3] == [
        *("/opt/apptainer", "--quiet", "exec", "--userns", "--containall", "--no-init", "--no-home", "--cleanenv"),
        *("--no-eval", "--no-privs", "--no-mount", "cwd,hostfs,bind-paths", "--net", "--network", "none"),
        *("--hostname", "sandbox", "--scratch", "/workspace", "/images/a.sif", "python3", "-I"),
    ]
    assert line[-3:-1] == ["-S", "-c"]


def test_the_kernel_limits_where_control_groups_are_delegated(tmp_path: Path) -> None:
    user = os.getuid()
    folder = tmp_path / "user.slice" / f"user-{user}.slice" / f"user@{user}.service"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("memory pids\n")
    line = command_line("apptainer", Path("a.sif"), LIMITS, cgroups=tmp_path)
    assert line[line.index("--memory") : line.index("a.sif")] == [
        *("--memory", str(LIMITS.memory_bytes + LIMITS.disk_bytes), "--pids-limit", "34"),
    ]


async def test_commands_files_and_python_in_one_container(
    images: ApptainerImages, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_DATABASE_URL", "postgresql://worker:secret-8261@db")
    await asyncio.to_thread(images.create, HANDLE, FILES)
    session = images.attach(HANDLE, images.choose(SandboxSpec()))
    said = await session.exec("cat data/maple12; pwd; id -u; cat /sys/class/net/*/ifindex 2>/dev/null", timeout_s=60)
    assert said.output == "code 42\n/workspace\n1000\n"
    assert (await session.exec("env; cd data; export A=1", timeout_s=60)).output.count("APPTAINER") == 0
    assert (await session.exec("basename $PWD; echo $A $HOME", timeout_s=60)).output == "data\n1 /workspace\n"
    assert (await session.exec("kill -9 -1; kill -9 1", timeout_s=60)).exit_code is not None
    assert (await session.file(ViewFile(path="data/maple12"))).output == "     1\tcode 42"
    assert (await session.python("6 * 7", timeout_s=60)).output == "42\n"
    seccomp = await session.exec("grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status", timeout_s=60)
    assert seccomp.output.split() == ["CapEff:", "0000000000000000", "NoNewPrivs:", "1", "Seccomp:", "2"]
    full = await session.exec("head -c 99999999 /dev/zero > big", timeout_s=60)
    assert (full.exit_code, full.limit) == (1, Limit.DISK)
    await session.close()
    calls = [json.loads(line) for line in program.with_name("calls.jsonl").read_text().splitlines()]
    assert len(calls) == 2  # INIT's look and RUN's container
    assert {tuple(call["environment"]) for call in calls} <= {("HOME", "PATH"), ("HOME", "LC_CTYPE", "PATH")}
    assert not [call for call in calls if "secret-8261" in str(call)]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--network", "there is a network: "),
        ("--containall", "other processes are in sight"),
        ("--no-init", "other processes are in sight"),
    ],
)
def test_a_wall_that_does_not_stand_is_seen_from_within(
    images: ApptainerImages, program: Path, option: str, why: str
) -> None:
    """An Apptainer that is configured otherwise, or is another version."""
    text = program.read_text()
    program.write_text(
        text.replace(f'options.get("{option}") == "none"', "False").replace(f'"{option}" in opt', "0 in opt")
    )
    assert program.read_text() != text
    with pytest.raises(EpisodeError, match=f"is no sandbox: .*the walls do not stand: {why}"):
        images.create(HANDLE, {})


def test_what_is_missing_is_said_with_what_to_do(folders: SandboxFolders, program: Path, image: Path) -> None:
    def why(name: str | None, at: str = str(program)) -> str:
        with pytest.raises(EpisodeError) as caught:
            ApptainerImages(folders, image=name, program=at).create(HANDLE, {})
        assert not (folders.root / HANDLE).exists()
        assert list(folders.root.iterdir()) == []
        return caught.value.detail

    assert "set ROLLMILL_SANDBOX_IMAGE, or sandbox.image of the run" in why(None)
    assert f"there is no image {image}.sif on this node" in why(f"{image}.sif")
    assert "apptainer pull image.sif docker://python:3.12" in why("docker://python:3.12")
    assert "/nowhere/apptainer is not in PATH: load its module" in why(str(image), "/nowhere/apptainer")
    (image / "python3").unlink()
    assert "the image has no python3, which runs the command server: build it in (FATAL: " in why(str(image))


def test_it_is_chosen_by_its_name_and_the_doctor_says_what_it_is(
    tmp_path: Path, program: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Settings(data_dir=tmp_path, sandbox="apptainer", sandbox_image=str(image), docker_url="unix:///nowhere/s")
    assert open_backend(given).choose(SandboxSpec()) == SandboxSpec(kind="apptainer", image=str(image))
    missing = {finding.name: finding for finding in backends(given)}["apptainer"]
    assert (missing.state, missing.remedy) == ("not installed", "load its module, or install it (apptainer.org)")
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    found = {finding.name: finding for finding in backends(given)}["apptainer"]
    assert found.state == f"works: {program}"
    assert "never run against a real Apptainer" in found.means
