"""Runs one process to its end or its time limit, for all kinds of sandbox. Its output and end go into `ExecResult`.

The process is a child of the event loop's own thread: a child that asked to die with its parent dies with the thread
that started it, and threads of a pool come and go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import EpisodeError
from common.outcomes import Outcome

MAX_KEPT_BYTES = 64 << 10
"""Output that is kept, from the beginning."""
MAX_WRITTEN_BYTES = 64 << 20
"""A process that writes more is killed: reading it would take the loop's time from all other episodes."""
INNER_KILL_WAIT_S = 1.0
KILL_WAIT_S = 5.0
KILLED = 128 + signal.SIGKILL
"""Exit code of a command that SIGKILL ended."""
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the process ended."""

    returncode: int
    """Negative = ended by that signal."""
    output: str
    num_dropped_bytes: int
    timed_out: bool

    @property
    def killed_for_output(self) -> bool:
        """Whether it was killed because it wrote too much."""
        return len(self.output.encode()) + self.num_dropped_bytes > MAX_WRITTEN_BYTES


class _Output:
    """Standard output and error of a process, read as it comes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.kept = bytearray()
        self.num_bytes = 0
        self.too_much = asyncio.Event()
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take one chunk; False when there is none now, or none will come."""
        try:
            chunk = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self.fd)
            return False
        self.num_bytes += len(chunk)
        self.kept += chunk[: MAX_KEPT_BYTES - len(self.kept)]
        if self.num_bytes > MAX_WRITTEN_BYTES:
            self.too_much.set()
        return True


async def run_process(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    user: int | None = None,
    inner: Callable[[], int | None] = lambda: None,
) -> Ended:
    """Run without standard input, in a session of its own. However it ends, its process group is killed after it.

    `user`: id of the user and group to run as, None = the worker's own. `inner`: id of the child to kill first, so
    that the process can still clear up after it, None = there is none. Raises EpisodeError when it can't be started
    or can't be killed. Cancelling kills it.
    """
    process = _start(argv, env=env, cwd=cwd, pass_fds=pass_fds, user=user)
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    with process.stdout:
        output = _Output(process.stdout.fileno())
        loop.add_reader(output.fd, output.read)
        try:
            timed_out = await _watch(process.pid, output, timeout_s)
        finally:
            loop.remove_reader(output.fd)
            if not await _kill(process.pid, inner()):
                raise EpisodeError(Outcome.SANDBOX_FAILED, f"process {process.pid} does not die")
            returncode = process.wait()
        # What it wrote before its end is in the pipe. A process that left the group may keep it open for ever.
        while output.num_bytes <= MAX_WRITTEN_BYTES and output.read():
            pass
    return Ended(
        returncode=returncode,
        output=output.kept.decode(errors="replace"),
        num_dropped_bytes=output.num_bytes - len(output.kept),
        timed_out=timed_out,
    )


def _start(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None, pass_fds: Sequence[int], user: int | None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            env=dict(env),
            cwd=cwd,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except OSError as error:
        raise EpisodeError(Outcome.SANDBOX_FAILED, f"cannot start {argv[0]}: {error}") from error


async def _watch(pid: int, output: _Output, timeout_s: float) -> bool:
    """Wait for the end, too much output, or the time limit; True for the last."""
    flood = asyncio.ensure_future(output.too_much.wait())
    end = asyncio.ensure_future(_wait_for_exit(pid, timeout_s))
    try:
        await asyncio.wait((flood, end), return_when=asyncio.FIRST_COMPLETED)
        return end.done() and not end.result()
    finally:
        flood.cancel()
        end.cancel()


async def _kill(pid: int, inner: int | None) -> bool:
    """Whether the process, which has not been reaped, is dead. Kills its group and before that its child `inner`."""
    # By its parent, since the number may be another process's by now.
    if inner is not None and _parent_of(inner) == pid:
        with suppress(ProcessLookupError):
            os.kill(inner, signal.SIGKILL)
        await _wait_for_exit(pid, INNER_KILL_WAIT_S)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return await _wait_for_exit(pid, KILL_WAIT_S)


def _parent_of(pid: int) -> int | None:
    try:
        # The name before it, in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


async def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Whether the process has ended (a zombie has) within the time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    else:
        return True
    finally:
        loop.remove_reader(handle)
        os.close(handle)
