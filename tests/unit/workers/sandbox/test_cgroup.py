"""Control groups v2 around bubblewrap. Where the kernel has no limits in them, their files are tried in a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import SetupError
from common.settings import Settings
from tests.unit.workers.sandbox.conftest import HANDLE
from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.cgroup import ROOT, Group, Groups, find_groups, settings_of
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.process import Launched
from workers.sandbox.protocol import Limit, Limits

LIMITS = Limits(memory_bytes=1 << 30, disk_bytes=1 << 28, num_processes=100, cpus=1.5)
WORKER = """
import asyncio, sys
from pathlib import Path
from tests.unit.workers.sandbox.test_cgroup import BareGroups
from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
walls = Bubblewrap(groups=BareGroups(folder=Path(sys.argv[2])))
session = FolderBackend(SandboxFolders.below(Path(sys.argv[1])), walls).attach("7-1")
asyncio.run(session.exec(sys.argv[3], timeout_s=60))
"""
HOSTILE = (
    "trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM HUP; sleep 60' & nohup sleep 60 & "
    "python3 -c 'import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(60)' & "
    "for n in $(seq 60); do setsid sleep 60 & done; while :; do (true &) ; done"
)


class BareGroups(Groups):
    """Groups without limits: of a hierarchy that has no controllers for them."""

    def make(self, handle: str, limits: Limits) -> Group:
        group = Group(path=self.folder / f"rollmill-{handle}-{os.getpid()}")
        group.path.mkdir()
        return group


def folder_of_groups(path: Path, *, controllers: str = "cpu memory pids", on: str = "cpu memory pids") -> Path:
    """Files as the kernel makes them."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in (("cgroup.procs", ""), ("cgroup.controllers", controllers), ("cgroup.subtree_control", on)):
        (path / name).write_text(text)
    return path


def test_limits_in_the_kernels_words() -> None:
    assert settings_of(LIMITS) == {
        "memory.max": str((1 << 30) + (1 << 28) + (128 << 20)),
        "memory.swap.max": "0",
        "pids.max": "108",
        "cpu.max": "150000 100000",
        "cpu.weight": "25",
    }


def test_a_group_is_made_with_its_limits(tmp_path: Path) -> None:
    group = Groups(folder=tmp_path).make(HANDLE, LIMITS)
    assert group.path.name.startswith(f"rollmill-7-1-{os.getpid()}-")
    assert {file.name: file.read_text() for file in group.path.iterdir()} == {
        name: settings_of(LIMITS)[name] for name in ("memory.max", "pids.max")
    }
    assert group.num_killed == 0
    group.events.write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n")
    assert group.num_killed == 3


@pytest.mark.parametrize(
    ("controllers", "on", "why"),
    [("cpu hugetlb", "", "has no controllers memory, pids: delegate"), (None, None, "is no control group")],
)
def test_a_folder_that_was_named_must_be_of_use(
    tmp_path: Path, controllers: str | None, on: str | None, why: str
) -> None:
    if controllers is not None and on is not None:
        folder_of_groups(tmp_path, controllers=controllers, on=on)
    with pytest.raises(SetupError, match=f"ROLLMILL_SANDBOX_CGROUP: {tmp_path} {why}"):
        find_groups(tmp_path)


def test_the_folder_around_the_workers_own_group(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/user/app/fleet.scope\n")
    root = folder_of_groups(tmp_path / "root")
    folder = folder_of_groups(root / "user/app")
    assert "must be said: ROLLMILL_SANDBOX_CGROUP" in str(find_groups(None, own=own, root=root, is_root=True))
    assert find_groups(None, own=own, root=tmp_path, is_root=False) == "control groups are v1 here"
    folder_of_groups(folder, controllers="cpu")
    assert "has no controllers memory, pids" in str(find_groups(None, own=own, root=root, is_root=False))
    own.write_text("0::/\n")
    assert "in no control group of its own" in str(find_groups(None, own=own, root=root, is_root=False))


@pytest.mark.parametrize(
    ("num_killed", "number", "died"), [(1, 9, True), (0, 9, False), (1, 15, False)], ids=["oom", "killed", "ended"]
)
async def test_a_sandbox_that_died_of_its_memory(tmp_path: Path, num_killed: int, number: int, died: bool) -> None:
    (tmp_path / "memory.events").write_text(f"oom_kill {num_killed}\n")
    with subprocess.Popen(["sleep", "60"]) as process, socket.socket() as stream:  # noqa: ASYNC220
        process.send_signal(number)
        launched = Launched(
            process=process, stream=stream, inner=lambda: None, remarks=lambda: "", group=Group(path=tmp_path)
        )
        assert await launched.died_of_memory() is died


@pytest.fixture
def bare() -> Iterator[BareGroups]:
    """A folder in the kernel's own hierarchy."""
    root = ROOT if (ROOT / "cgroup.procs").exists() else ROOT / "unified"
    folder = root / f"rollmill-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups v2 that may be written: {error}")
    yield BareGroups(folder=folder)
    for left in folder.glob("rollmill-*"):
        Group(path=left).end()
    folder.rmdir()


@pytest.mark.robustness
async def test_all_of_a_sandbox_is_in_its_group(
    bubblewrap: FolderBackend, folders: SandboxFolders, bare: BareGroups
) -> None:
    backend = FolderBackend(folders, Bubblewrap(groups=bare))
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    assert (await session.exec("echo kept > file; sleep 60 & true", timeout_s=60)).exit_code == 0
    (group,) = bare.folder.glob("rollmill-7-1-*")
    pids = set(map(int, (group / "cgroup.procs").read_text().split()))
    (owned,) = folders.owners.of(HANDLE).values()
    assert owned.inner is not None
    assert {owned.outer.pid, owned.inner.pid} <= pids
    assert os.getpid() not in pids
    await session.close()
    assert list(bare.folder.glob("rollmill-*")) == []


@pytest.mark.robustness
def test_nothing_is_left_of_a_worker_that_is_killed(
    bubblewrap: FolderBackend, folders: SandboxFolders, bare: BareGroups
) -> None:
    """Neither processes, which the group counts whatever they did to hide, nor mounts; the sweep removes the group."""
    bubblewrap.create(HANDLE, {})
    mounts = num_mounts()
    arguments = (str(folders.root.parent), str(bare.folder), HOSTILE)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, *arguments], cwd=Path(__file__).parents[4])
    procs = bare.folder / f"rollmill-7-1-{worker.pid}" / "cgroup.procs"
    try:
        until(lambda: procs.exists() and len(procs.read_text().split()) > 60 and folders.owners.of(HANDLE))
    finally:
        worker.kill()
        worker.wait(60)
    killed = time.monotonic()
    until(lambda: not procs.read_text())
    sys.stdout.write(f"gone after {1000 * (time.monotonic() - killed):.0f} ms\n")
    assert folders.owners.sweep() == 1
    assert list(bare.folder.glob("rollmill-*")) == []
    assert list(folders.owners.root.iterdir()) == []
    assert num_mounts() == mounts


def num_mounts() -> int:
    return len(Path("/proc/self/mountinfo").read_text().splitlines())


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.robustness
async def test_the_kernels_limit_of_memory_is_told(bubblewrap: FolderBackend, folders: SandboxFolders) -> None:
    """Of many processes at once, faster than the server looks."""
    groups = find_groups(Settings().sandbox_cgroup)
    if isinstance(groups, str):
        pytest.skip(f"no control groups v2 with limits: {groups}")
    small = Limits(memory_bytes=64 << 20, disk_bytes=16 << 20)
    backend = FolderBackend(folders, Bubblewrap(small, groups=groups))
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    result = await session.exec("python3 -c 'x = b\"x\" * (800 << 20)'", timeout_s=60)
    assert (result.exit_code, result.limit) == (137, Limit.MEMORY)
    assert (await session.exec("echo alive", timeout_s=60)).output == "alive\n"
    await session.close()
