"""Containers of a real engine: what it lacks is said by INIT, and nothing of a sandbox outlives its owner."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.sandbox.conftest import HANDLE, containers
from tests.unit.workers.sandbox.engines import Engine
from tests.unit.workers.sandbox.marked import MARK, running, until_gone, until_running
from workers.sandbox.container_records import DATA_DIR, EXPIRES, WORKER, ContainerRecord
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.owners import Identity
from workers.sandbox.protocol import SandboxSpec

pytestmark = pytest.mark.robustness
HOSTILE = (
    f"trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM HUP; sleep 60 # {MARK}' & nohup sleep 60 & "
    "(setsid sh -c 'sleep 60 & sleep 60' &); while :; do (true &); done"
)
WORKER_PROGRAM = """
import asyncio, sys
from pathlib import Path
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
folders = SandboxFolders.below(Path(sys.argv[1]))
session = Containers(folders, ContainerEngine(sys.argv[2]), image=sys.argv[3], pull="never").attach("7-1")
asyncio.run(session.exec(sys.argv[4], timeout_s=60))
"""


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def backend(folders: SandboxFolders, engine: Engine) -> Iterator[Containers]:
    yield from containers(folders, engine)


def failure(backend: Containers, image: str) -> str:
    """What INIT says of an image. It is never the agent's fault."""
    with pytest.raises(EpisodeError) as caught:
        backend.create(HANDLE, {}, SandboxSpec(kind="docker", image=image))
    assert caught.value.outcome is Outcome.SANDBOX_FAILED
    assert not backend.records.of("0-1")
    return caught.value.detail


def test_an_image_that_is_not_there(backend: Containers) -> None:
    assert "has no image none:1: load it there (docker pull" in failure(backend, "none:1")


def test_an_image_that_cannot_be_pulled(folders: SandboxFolders, engine: Engine) -> None:
    backend = Containers(folders, engine.client, pull="missing")
    said = failure(backend, "127.0.0.1:9/none:1")
    assert "cannot pull image 127.0.0.1:9/none:1" in said
    assert "ROLLMILL_SANDBOX_PULL=never" in said
    backend.close()


def test_an_image_without_python(backend: Containers, engine: Engine) -> None:
    assert "the image has no python3, which runs the command server: add it" in failure(backend, engine.no_python)


def test_an_image_with_volumes(docker: Containers, tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    client = docker.engine._client()
    client.import_image_from_file(str(tmp_path / "empty.tar"), repository="volumes", tag="1", changes=["VOLUME /data"])
    assert "declares volumes, which no limit holds: build it without /data" in failure(docker, "volumes:1")


def test_a_runtime_that_the_engine_has_not(folders: SandboxFolders, engine: Engine) -> None:
    backend = Containers(folders, engine.client, pull="never", runtime="no-such-runtime")
    assert "no-such-runtime" in failure(backend, engine.agent)
    backend.close()


def test_a_full_disk_of_the_engine(backend: Containers, engine: Engine) -> None:
    backend._proven.clear()
    fill = Path(f"/proc/{engine.process.pid}/root{engine.data}/fill")
    try:
        subprocess.run(["dd", "if=/dev/zero", f"of={fill}", "bs=1M"], capture_output=True, timeout=60, check=False)
        assert "its disk is full: free room" in failure(backend, engine.agent)
    finally:
        fill.unlink()
    backend.create(HANDLE, {}, SandboxSpec(kind="docker", image=engine.agent))


def start_worker(backend: Containers, engine: Engine, command: str) -> subprocess.Popen[bytes]:
    """Another process that plays the sandbox HANDLE."""
    arguments = (str(backend.records.root.parent), engine.client.url, engine.agent, command)
    return subprocess.Popen([sys.executable, "-c", WORKER_PROGRAM, *arguments], cwd=Path(__file__).parents[4])


def ours(backend: Containers) -> int:
    """Containers of the data folder that stand."""
    return len(backend.engine.ours([f"{DATA_DIR}={backend.records.root.parent}"]))


def traces(engine: Engine, container: str) -> list[str]:
    """Control groups and mounts of a container."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/*/*{container}*")]
    mounts = Path(f"/proc/{engine.process.pid}/mountinfo").read_text().splitlines()
    return groups + [line for line in mounts if container in line]


async def test_a_worker_that_is_killed_takes_its_container_along(backend: Containers, engine: Engine) -> None:
    backend.create(HANDLE, {})
    worker = start_worker(backend, engine, HOSTILE)
    await until_running()
    (container,) = backend.engine.ours([f"{DATA_DIR}={backend.records.root.parent}"])
    assert traces(engine, container.id)
    worker.kill()
    worker.wait(10)
    await until_gone()
    await asyncio.to_thread(backend.sweep)
    deadline = time.monotonic() + 60
    while ours(backend) or traces(engine, container.id):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert len(backend.records.of(HANDLE)) == 1
    backend.destroy(HANDLE)
    assert backend.records.of(HANDLE) == []


async def test_another_process_removes_exactly_the_sandbox_that_it_is_told(backend: Containers, engine: Engine) -> None:
    for handle in (HANDLE, "8-1"):
        backend.create(handle, {})
    other = backend.attach("8-1")
    await other.exec("echo stays > file", timeout_s=20)
    worker = start_worker(backend, engine, HOSTILE)
    await until_running()
    await asyncio.to_thread(backend.destroy, HANDLE)
    assert running() == []
    assert (await other.exec("cat file", timeout_s=20)).output == "stays\n"
    assert worker.wait(20) == 1, "the worker that plays it learns that it is gone"
    await other.close()


async def test_the_sweep_removes_what_nobody_owns(backend: Containers, engine: Engine) -> None:
    """Containers whose note is lost: of a dead worker, and of one whose time is up. A live worker's stays."""
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    await session.exec("echo stays > file", timeout_s=20)
    labels = backend.records.labels("9-1")
    worker = Identity(**json.loads(labels[WORKER]))
    dead = {**labels, WORKER: json.dumps(asdict(replace(worker, started=worker.started - 1)))}
    foreign = {**labels, WORKER: json.dumps(asdict(replace(worker, boot="another machine")))}
    for name, each in (("dead", dead), ("old", {**foreign, EXPIRES: "1"}), ("foreign", foreign)):
        backend.engine.create(f"sweep-{name}", engine.agent, host={}, entrypoint=["true"], labels=each)
    assert await asyncio.to_thread(backend.records.sweep, backend.engine) == 2
    assert ours(backend) == 2
    assert (await session.exec("cat file", timeout_s=20)).output == "stays\n"
    await session.close()
    backend.engine.remove("sweep-foreign")


async def test_a_container_that_is_removed_is_the_sandboxes_fault(backend: Containers) -> None:
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    running_long = asyncio.ensure_future(session.exec("sleep 30", timeout_s=40))
    (record,) = await until_noted(backend)
    while not running_long.done():
        await asyncio.to_thread(backend.engine.remove, record.name)
        await asyncio.wait({running_long}, timeout=0.2)
    with pytest.raises(EpisodeError) as caught:
        running_long.result()
    assert caught.value.outcome is Outcome.SANDBOX_FAILED
    await session.close()


async def until_noted(backend: Containers) -> list[ContainerRecord]:
    deadline = time.monotonic() + 20
    while not (found := backend.records.of(HANDLE)) or not ours(backend):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return found


async def test_a_sandbox_that_is_removed_while_it_starts_leaves_no_container(backend: Containers) -> None:
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    starting = asyncio.ensure_future(session.exec("true", timeout_s=20))
    await asyncio.sleep(0)
    backend._folders.destroy(HANDLE)
    with pytest.raises(EpisodeError):
        await starting
    assert ours(backend) == 0


async def test_a_start_that_is_cancelled_leaves_no_container(backend: Containers) -> None:
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    starting = asyncio.ensure_future(session.exec("true", timeout_s=20))
    deadline = time.monotonic() + 20
    while not backend.records.of(HANDLE):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (ours(backend), backend.records.of(HANDLE)) == (0, [])


async def test_many_start_at_once(backend: Containers) -> None:
    handles = [f"{number}-1" for number in range(1, 9)]
    for handle in handles:
        backend.create(handle, {"who": handle})
    sessions = [backend.attach(handle) for handle in handles]
    said = await asyncio.gather(*[session.exec("cat who", timeout_s=60) for session in sessions])
    assert [each.output for each in said] == handles
    await asyncio.gather(*[session.close() for session in sessions])
