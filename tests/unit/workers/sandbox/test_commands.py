"""What a command can do and what it can't, in sandboxes of both kinds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.sandbox.marked import MARK, running, until_gone, until_running, user_of
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import OPEN, Backend, Limit, Limits, SandboxSession

HANDLE = "7-1"


@pytest.fixture(params=["bubblewrap", "limited"])
def any_backend(request: pytest.FixtureRequest) -> Backend:
    """The kinds that need no engine."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def walled(bubblewrap: FolderBackend) -> Backend:
    return bubblewrap


def kind_of(backend: Backend) -> str:
    return str(backend.choose(OPEN).kind)


async def output_of(session: SandboxSession, command: str, *, timeout_s: float = 20) -> str:
    result = await session.exec(command, timeout_s=timeout_s)
    assert (result.exit_code, result.truncated) == (0, False), result
    return result.output


async def test_commands_share_the_folder(session: SandboxSession) -> None:
    assert await output_of(session, "cat notes.txt data/maple12") == "hello\ncode 42\n"
    await output_of(session, "mkdir made && echo new > made/file")
    assert await output_of(session, "cat made/file") == "new\n"


async def test_both_outputs_come_in_order(session: SandboxSession) -> None:
    assert await output_of(session, "echo a; echo b >&2; echo c") == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [("true", 0), ("exit 3", 3), ("no-such-program", 127), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("(", 2)],
)
async def test_exit_codes_are_the_shells(session: SandboxSession, command: str, exit_code: int) -> None:
    assert (await session.exec(command, timeout_s=20)).exit_code == exit_code


async def test_there_is_no_input(session: SandboxSession) -> None:
    assert await output_of(session, "cat; echo end") == "end\n"


async def test_a_command_that_a_process_argument_cannot_hold(session: SandboxSession) -> None:
    assert await output_of(session, "echo \ud800\0é") == "??é\n"
    assert await output_of(session, "#" + "x" * 200_000 + "\necho long") == "long\n"
    result = await session.exec("#" + "x" * 2_000_000, timeout_s=20)
    assert (result.exit_code, result.timed_out) == (126, False)
    assert "2000001 bytes" in result.output


async def test_output_that_is_no_text(session: SandboxSession) -> None:
    assert await output_of(session, r"printf 'a\377\0b'") == "a\ufffd\0b"


async def test_long_output_is_cut_and_counted(session: SandboxSession) -> None:
    result = await session.exec("head -c 1000000 /dev/zero | tr '\\0' x; exit 5", timeout_s=20)
    assert result.output == "x" * Limits().kept_bytes
    assert result.num_dropped_bytes == 1_000_000 - Limits().kept_bytes
    assert result.exit_code == 5
    assert result.truncated


async def test_endless_output_is_ended(session: SandboxSession) -> None:
    result = await session.exec("yes", timeout_s=60)
    assert (result.exit_code, result.timed_out, result.limit) == (137, False, Limit.OUTPUT)
    assert result.num_dropped_bytes >= Limits().written_bytes - Limits().kept_bytes


async def test_a_time_limit_keeps_the_output(session: SandboxSession) -> None:
    started = time.monotonic()
    result = await session.exec("echo before; trap '' TERM INT; sleep 60; echo after", timeout_s=0.5)
    assert (result.exit_code, result.timed_out, result.output) == (None, True, "before\n")
    assert time.monotonic() - started < 10


async def test_a_background_process_neither_holds_the_answer_nor_lives_on(session: SandboxSession) -> None:
    started = time.monotonic()
    await output_of(
        session, "(while true; do echo >> beat; sleep 0.01; done) & until test -s beat; do sleep 0.01; done"
    )
    assert time.monotonic() - started < 15
    await assert_stands_still(session)


async def assert_stands_still(session: SandboxSession) -> None:
    before = await output_of(session, "wc -c < beat")
    assert int(before) > 0
    assert await output_of(session, "sleep 0.1; wc -c < beat") == before


@pytest.mark.parametrize("timeout_s", [0.5, 20])
async def test_nothing_escapes_the_walls_by_leaving_its_group(walled_session: SandboxSession, timeout_s: float) -> None:
    escape = "setsid sh -c 'trap \"\" TERM HUP; while true; do echo >> beat; sleep 0.01; done' & "
    escape += "until test -s beat; do sleep 0.01; done"
    command = escape if timeout_s > 10 else f"{escape}; sleep 60"
    assert (await walled_session.exec(command, timeout_s=timeout_s)).timed_out == (timeout_s < 10)
    await assert_stands_still(walled_session)


async def test_cancelling_kills_the_command(session: SandboxSession) -> None:
    await output_of(session, "echo kept > file")
    task = asyncio.create_task(session.exec(f"while true; do echo >> beat; sleep 0.01; done # {MARK}", timeout_s=60))
    await until_running()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await assert_stands_still(session)
    assert await output_of(session, "cat file") == "kept\n"


async def test_many_at_once(session: SandboxSession) -> None:
    results = await asyncio.gather(*[output_of(session, f"echo {number}") for number in range(20)])
    assert results == [f"{number}\n" for number in range(20)]


async def test_nothing_is_left_open(session: SandboxSession) -> None:
    await session.exec("true", timeout_s=20)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all it needs
    for command, timeout_s in (("true", 20.0), ("sleep 60", 0.1), ("exit 1", 20.0)):
        await session.exec(command, timeout_s=timeout_s)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_the_workers_environment_stays_outside(session: SandboxSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_DATABASE_URL", "postgresql://secret")
    printed = await output_of(session, "env; cat /proc/self/environ /proc/1/environ 2>/dev/null; true")
    assert "secret" not in printed
    assert "ROLLMILL" not in printed


async def test_open_files_of_the_worker_are_not_inherited(session: SandboxSession, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert str(tmp_path / "open") not in await output_of(session, "ls -l /proc/self/fd")


async def test_a_sandbox_that_is_gone_is_the_sandboxes_fault(backend: FolderBackend) -> None:
    with pytest.raises(EpisodeError, match="7-1 is gone"):
        backend.attach(HANDLE)
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    await session.exec("true", timeout_s=20)
    backend.destroy(HANDLE)
    with pytest.raises(EpisodeError, match="7-1 is gone") as caught:
        await session.exec("true", timeout_s=20)
    assert caught.value.outcome is Outcome.SANDBOX_FAILED
    await session.close()


def test_works_on_a_loop_in_another_thread(backend: FolderBackend) -> None:
    """The process that makes bubblewrap die with its parent watches the thread, which must live on between commands."""
    backend.create(HANDLE, {})
    session = backend.attach(HANDLE)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for _ in range(3):
            long = asyncio.run_coroutine_threadsafe(session.exec("sleep 0.2; echo done", timeout_s=20), loop)
            short = asyncio.run_coroutine_threadsafe(session.exec("echo done", timeout_s=20), loop)
            assert (short.result(20).output, long.result(20).output) == ("done\n", "done\n")
        asyncio.run_coroutine_threadsafe(session.close(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


WORKER = """
import asyncio, sys
from pathlib import Path
from tests.unit.workers.sandbox.marked import MARK, running, until_gone, until_running, user_of
from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.restricted import Restricted
walls = Bubblewrap() if sys.argv[2] == "bubblewrap" else Restricted()
session = FolderBackend(SandboxFolders.below(Path(sys.argv[1])), walls).attach("7-1")
asyncio.run(session.exec(sys.argv[3], timeout_s=60))
"""
HOSTILE = (
    f"trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM HUP; sleep 60 # {MARK}' & nohup sleep 60 & sleep 60 # {MARK}"
)


def start_worker(folders: SandboxFolders, kind: str, command: str) -> subprocess.Popen[bytes]:
    """Another process that plays the sandbox HANDLE."""
    arguments = (str(folders.root.parent), kind, command)
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], cwd=Path(__file__).parents[4])


async def test_a_worker_that_is_killed_takes_its_commands_along(
    backend: FolderBackend, folders: SandboxFolders
) -> None:
    backend.create(HANDLE, {})
    worker = start_worker(folders, kind_of(backend), HOSTILE)
    await until_running()
    (owned,) = folders.owners.of(HANDLE).values()
    worker.kill()
    killed = time.monotonic()
    worker.wait(10)
    await until_gone()
    assert time.monotonic() - killed < 1
    assert owned.end()
    backend.destroy(HANDLE)
    assert list(folders.owners.root.iterdir()) == []


async def test_another_process_removes_exactly_the_sandbox_that_it_is_told(
    backend: FolderBackend, folders: SandboxFolders
) -> None:
    backend.create(HANDLE, {})
    backend.create("8-1", {})
    other = backend.attach("8-1")
    await output_of(other, "echo stays > file")
    worker = start_worker(folders, kind_of(backend), HOSTILE)
    await until_running()
    backend.destroy(HANDLE)
    assert running() == []
    assert await output_of(other, "cat file") == "stays\n"
    assert worker.wait(20) == 1, "the worker that plays it learns that it is gone"
    await other.close()


async def test_an_agent_inside_the_walls_is_nobody(walled_session: SandboxSession) -> None:
    assert await output_of(walled_session, "id -u; id -un; hostname; pwd") == "1000\nagent\nsandbox\n/workspace\n"
    capabilities = await output_of(walled_session, "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
    assert capabilities.split() == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


async def test_the_walls_show_the_system_read_only_and_nothing_else(walled_session: SandboxSession) -> None:
    result = await walled_session.exec(
        "touch /usr/x; touch /x; touch /etc/passwd; mkdir /proc/x; touch /dev/x", timeout_s=20
    )
    assert result.exit_code != 0
    assert len(result.output.splitlines()) == 5
    for path in ("/root", "/home", "/var", "/run", "/etc/shadow", "/sys", str(Path.cwd()), "/boot"):
        assert (await walled_session.exec(f"test -e {path}", timeout_s=20)).exit_code == 1, path
    assert await output_of(walled_session, "echo x > /tmp/x && cat /tmp/x") == "x\n"


async def test_the_walls_hide_processes_and_network(walled_session: SandboxSession) -> None:
    assert set(
        (await output_of(walled_session, "ls /sys/class/net 2>/dev/null; tail -n +3 /proc/net/dev"))
        .split(":")[0]
        .split()
    ) == {"lo"}
    pids = await output_of(walled_session, "ls /proc | grep -E '^[0-9]+$'")
    assert len(pids.split()) <= 6


async def test_the_walls_forbid_more_namespaces(walled_session: SandboxSession) -> None:
    assert (await walled_session.exec("unshare --user true", timeout_s=20)).exit_code == 1


async def test_a_fork_bomb_stays_inside(walled_session: SandboxSession) -> None:
    await walled_session.exec("bomb() { bomb | bomb & }; bomb; sleep 0.5", timeout_s=20)
    assert await output_of(walled_session, "echo fine") == "fine\n"


async def test_files_and_memory_are_limited(session: SandboxSession) -> None:
    result = await session.exec("head -c 300000000 /dev/zero > big; stat -c %s big; rm big", timeout_s=60)
    assert int(result.output.split()[-1]) == 256 << 20
    hungry = "import sys; sys.stdout.write(str(len(bytearray(5 << 30))))"
    assert (await session.exec(f"/usr/bin/python3 -c '{hungry}'", timeout_s=60)).exit_code == 1


async def test_agents_of_a_root_worker_are_an_ordinary_user(session: SandboxSession, folders: SandboxFolders) -> None:
    await output_of(session, "true")
    (owned,) = folders.owners.of(HANDLE).values()
    server = owned.inner or owned.outer
    user = user_of(server.pid)
    assert user == os.geteuid() or os.geteuid() == 0
    assert user != 0
