"""How sandboxes end before their time: by their lifetime, by their memory, by a worker that is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.sandbox.conftest import HANDLE
from tests.unit.workers.sandbox.engines import Engine
from workers.sandbox.backend import FolderBackend
from workers.sandbox.client import CommandClient, ServerLost
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.owners import Identity, Owned
from workers.sandbox.protocol import Backend, ExecResult, OutOfMemory, SandboxSpec, ServerCall
from workers.sandbox.session import Session

NOTES = ("sandbox-owners", "sandbox-containers")


@pytest.mark.robustness
async def test_a_lifetime_ends_the_command_and_the_sandbox(any_backend: Backend, folders: SandboxFolders) -> None:
    spec = SandboxSpec(lifetime_s=1)
    if not isinstance(any_backend, FolderBackend):
        spec = any_backend.choose(spec)
    await asyncio.to_thread(any_backend.create, HANDLE, {}, spec)
    session = any_backend.attach(HANDLE, spec)
    for _ in range(2):
        with pytest.raises(EpisodeError, match=r"sandbox 7-1 has run for 1 s.*sandbox.lifetime_s") as caught:
            await session.exec("setsid sleep 60 & sleep 60", timeout_s=90)
        assert caught.value.outcome is Outcome.SANDBOX_EXPIRED
    await session.close()
    assert [note for name in NOTES for note in (folders.root.parent / name).glob("*")] == []


def sleeping() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def test_the_sweep_ends_what_has_expired_and_what_a_dead_worker_left(folders: SandboxFolders) -> None:
    """By the very processes, whatever their names."""
    worker = Identity.of(os.getpid())
    assert worker is not None
    dead = replace(worker, started=worker.started - 1)
    left = {name: sleeping() for name in ("kept", "expired", "orphan", "foreign", "reused")}
    for number, (name, process) in enumerate(left.items()):
        outer = Identity.of(process.pid)
        assert outer is not None
        owned = Owned(worker=worker, outer=outer, inner=None, expires=time.time() + (-1 if name == "expired" else 99))
        if name == "orphan":
            owned = replace(owned, worker=dead)
        elif name == "foreign":
            owned = replace(owned, outer=replace(outer, boot="another"))
        elif name == "reused":
            owned = replace(owned, worker=dead, outer=replace(outer, started=outer.started - 1))
        folders.owners.record(f"{number}-1", owned)
    try:
        assert folders.owners.sweep() == 3
        assert left["expired"].wait(60) < 0
        assert left["orphan"].wait(60) < 0
        assert [left[name].poll() for name in ("kept", "foreign", "reused")] == [None] * 3
        assert sorted(file.name[0] for file in folders.owners.root.glob("[0-9]*")) == ["0", "3"]
    finally:
        for process in left.values():
            process.kill()
            process.wait(60)


class LostServer:
    """A server that is lost at its first command."""

    def __init__(self, *, of_memory: bool) -> None:
        self._of_memory = of_memory
        self.num_ends = 0
        self.ends = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    @property
    def client(self) -> CommandClient:
        return LostClient()  # type: ignore[return-value]

    async def start(self, folder: Path) -> None:
        return

    async def end(self) -> None:
        self.ends.set()
        await self.may_end.wait()
        self.num_ends += 1

    def explain(self, why: str) -> str:
        return why

    async def died_of_memory(self) -> bool:
        return self._of_memory


class LostClient:
    async def ask(self, what: ServerCall, *, timeout_s: float) -> ExecResult:
        raise ServerLost("the command server has ended")


@pytest.mark.parametrize(("of_memory", "kind"), [(True, OutOfMemory), (False, EpisodeError)])
async def test_what_died_of_its_memory_is_the_agents_fault(
    folders: SandboxFolders, of_memory: bool, kind: type[Exception]
) -> None:
    folders.create(HANDLE, {})
    server = LostServer(of_memory=of_memory)
    session = Session(folders, HANDLE, lambda: server)
    for _ in range(2):
        with pytest.raises(kind, match="sandbox 7-1: the command server has ended"):
            await session.exec("true", timeout_s=20)
    assert server.num_ends == 1
    await session.close()


@pytest.mark.robustness
def test_docker_tells_the_want_of_memory_from_other_ends(docker_engine: Engine) -> None:
    since = time.time()
    engine = docker_engine.client
    greedy = "kept = []\nfor _ in range(400): kept.append(bytearray(b'x' * (1 << 20)))"
    ends = {"greedy": ["python3", "-c", greedy], "killed": ["sleep", "60"]}
    for name, command in ends.items():
        made = engine.create(
            f"end-{name}", docker_engine.agent, host={"mem_limit": 64 << 20, "network_mode": "none"}, entrypoint=command
        )
        engine.start(made, docker_engine.agent)
    engine._client().kill("end-killed")
    for name in ends:
        assert engine._client().wait(f"end-{name}")["StatusCode"] == 137
        engine.remove(f"end-{name}")
    assert engine.died_of_memory("end-greedy", since=since)
    assert not engine.died_of_memory("end-killed", since=since)


async def test_a_server_that_ends_ends_whoever_is_cancelled_meanwhile(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {})
    server = LostServer(of_memory=False)
    server.may_end.clear()
    asking = asyncio.create_task(Session(folders, HANDLE, lambda: server).exec("true", timeout_s=20))
    await server.ends.wait()
    asking.cancel()
    await asyncio.sleep(0)
    server.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert server.num_ends == 1
