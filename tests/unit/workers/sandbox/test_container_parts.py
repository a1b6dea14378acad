"""What needs no engine of the backend for containers."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from common.settings import Settings
from workers.sandbox import container_start, open_backend, seccomp, seccomp_profile
from workers.sandbox.backend import FolderBackend
from workers.sandbox.client import ServerLost
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.container_server import DockerStream
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import OPEN, SandboxSpec
from workers.sandbox.start_gate import StartGate

NOWHERE = "unix:///nowhere/sock"


def refused(name: str, *, has_ip: bool = True) -> list[dict[str, object]]:
    """The rules of one call."""
    rules = json.loads(seccomp_profile.profile("x86_64", has_ip=has_ip))["syscalls"]
    return [rule for rule in rules if name in rule["names"]]


def test_engines_refuse_the_calls_that_bubblewrap_refuses() -> None:
    for name in (*seccomp.NOT_PERMITTED, *seccomp.NOT_THERE):
        (rule,) = refused(name)
        assert (rule["action"], rule["args"]) == ("SCMP_ACT_ERRNO", [])


@pytest.mark.parametrize(("has_ip", "families"), [(True, {1, 2, 10, 16}), (False, {1, 16})])
def test_few_families_of_sockets_are_left(has_ip: bool, families: set[int]) -> None:
    rules = [rule["args"][0] for rule in refused("socket", has_ip=has_ip)]  # type: ignore[index]

    def is_refused(family: int) -> bool:
        compared = {"SCMP_CMP_GT": lambda value: family > value, "SCMP_CMP_EQ": lambda value: family == value}
        return any(compared[rule["op"]](rule["value"]) for rule in rules)

    assert {family for family in range(64) if not is_refused(family)} == families


def test_no_engine_says_what_to_do(folders: SandboxFolders) -> None:
    backend = Containers(folders, ContainerEngine(NOWHERE), image="agent:1")
    with pytest.raises(EpisodeError, match=r"does not answer: start it .*ROLLMILL_DOCKER_URL") as caught:
        backend.create("7-1", {})
    assert caught.value.outcome is Outcome.SANDBOX_FAILED
    assert list(folders.root.iterdir()) == []
    backend.close()


def test_no_image_says_what_to_do(folders: SandboxFolders) -> None:
    backend = Containers(folders, ContainerEngine(NOWHERE))
    with pytest.raises(EpisodeError, match="ROLLMILL_SANDBOX_IMAGE"):
        backend.choose(OPEN)
    backend.close()


def test_a_tasks_image_asks_for_containers(bubblewrap: FolderBackend, tmp_path: Path) -> None:
    node = open_backend(Settings(data_dir=tmp_path))
    assert node.choose(SandboxSpec(image="agent:1")) == SandboxSpec(kind="docker", image="agent:1")
    assert node.choose(OPEN) == SandboxSpec(kind="bubblewrap")
    with pytest.raises(EpisodeError, match="of no use to bubblewrap: set ROLLMILL_SANDBOX=docker"):
        node.choose(SandboxSpec(kind="bubblewrap", image="agent:1"))


def test_the_nodes_image_is_for_tasks_that_name_none(tmp_path: Path) -> None:
    node = open_backend(Settings(data_dir=tmp_path, sandbox="docker", sandbox_image="node:1", docker_url=NOWHERE))
    assert node.choose(OPEN) == SandboxSpec(kind="docker", image="node:1")
    assert node.choose(SandboxSpec(image="task:1")).image == "task:1"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("tcp://engine.example:2375", "tcp://engine.example:2375"),
        ("tcp://10.0.0.7:2375", "tcp://10.0.0.7:2375"),
        ("tcp://127.0.0.1:2375", None),
        ("tcp://localhost:2375", None),
        ("tcp://[::1]:2375", None),
        ("unix:///var/run/docker.sock", None),
    ],
)
def test_only_an_engine_that_other_nodes_reach_by_the_same_name_leaves_an_episode_free(
    tmp_path: Path, url: str, endpoint: str | None
) -> None:
    node = open_backend(Settings(data_dir=tmp_path, sandbox="docker", sandbox_image="node:1", docker_url=url))
    assert node.choose(OPEN) == SandboxSpec(kind="docker", image="node:1", endpoint=endpoint)


def test_a_note_of_a_container_stays_until_its_engine_has_removed_it(tmp_path: Path) -> None:
    node = open_backend(Settings(data_dir=tmp_path, sandbox="docker", docker_url=NOWHERE))
    containers = Containers(SandboxFolders.below(tmp_path), ContainerEngine(NOWHERE))
    node.destroy("7-1")
    containers.records.fresh("7-1", "unix:///elsewhere/sock").write()
    with pytest.raises(EpisodeError, match="unix:///elsewhere/sock does not answer"):
        node.destroy("7-1")
    assert len(containers.records.of("7-1")) == 1
    containers.close()


def test_a_kind_that_was_named_must_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", "/nowhere")
    with pytest.raises(SetupError, match="ROLLMILL_SANDBOX=bubblewrap: bubblewrap is not installed"):
        open_backend(Settings(data_dir=tmp_path, sandbox="bubblewrap"))


def test_no_walls_by_name_is_one_loud_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_backend(Settings(data_dir=tmp_path, sandbox="subprocess")).choose(OPEN).kind == "subprocess"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NO SANDBOX: ROLLMILL_SANDBOX=subprocess" in caplog.text


async def test_no_more_starts_at_once_than_there_are_places(tmp_path: Path) -> None:
    at_once: list[int] = []
    now = 0

    async def start(gate: StartGate) -> None:
        nonlocal now
        async with gate.place():
            now += 1
            at_once.append(now)
            await asyncio.sleep(0.01)
            now -= 1

    # A gate each, as each process has one.
    await asyncio.gather(*[start(StartGate(tmp_path / "starts", num_places=2)) for _ in range(8)])
    assert (len(at_once), max(at_once)) == (8, 2)


def framed(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", kind, len(data)) + data


async def test_what_a_container_writes_is_told_apart() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(framed(1, b"ab") + framed(2, b"said\n" * 2000) + framed(1, b"cdef"))
    stream = DockerStream(reader)
    assert (await stream.readexactly(3), await stream.readexactly(3)) == (b"abc", b"def")
    assert stream.errors == (b"said\n" * 2000)[-4096:]


async def test_a_frame_that_is_too_large_is_refused() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack(">BxxxI", 1, 1 << 30))
    with pytest.raises(ServerLost, match="too much"):
        await DockerStream(reader).readexactly(1)


def test_a_container_without_its_walls_runs_no_command(tmp_path: Path) -> None:
    """This process has none of them: which is said first depends on who runs it."""
    walls = {"memory_bytes": 1 << 30, "num_processes": 100}
    given = json.dumps({"walls": walls, "folders": [], "files": {}, "server": "", "config": ""}).encode()
    command = [sys.executable, "-I", "-S", "-c", Path(container_start.__file__).read_text()]
    done = subprocess.run(command, input=struct.pack(">I", len(given)) + given, capture_output=True, timeout=30)
    assert done.returncode == 3
    assert done.stdout == b""
    assert b"the engine did not apply what was asked for: " in done.stderr
