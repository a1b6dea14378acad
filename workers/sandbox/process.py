"""A sandbox's outermost process: started by the worker with a stream to the command server, and ended with it.

The process is a child of the event loop's own thread: a child that asked to die with its parent dies with the thread
that started it, and threads of a pool come and go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.cgroup import Group
from workers.sandbox.owners import EXPIRY_GRACE_S, Identity, Owned

INNER_KILL_WAIT_S = 1.0
KILL_WAIT_S = 5.0
END_WAIT_S = 2.0
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How bubblewrap ends when its first process is killed: by itself, or as that did."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A sandbox's processes, whose server says when it is ready."""

    process: subprocess.Popen[bytes]
    stream: socket.socket
    """To the command server; it ends when this does."""
    inner: Callable[[], int | None]
    """Number of the sandbox's own first process; None = there is none, or it is not known yet."""
    remarks: Callable[[], str]
    """The last line that the processes said about themselves."""
    first: bytes = b""
    """What the server's stream is to be told before anything is expected of it."""
    lent: socket.socket | None = None
    """By it the server has handed over a listener before it is ready; None = there is no proxy."""

    group: Group | None = None
    """The control group that all of it is in; None = there is none."""

    def owned(self, *, lifetime_s: float) -> Owned | None:
        """Who they are; None = they have ended already."""
        inner_pid = self.inner()
        worker, outer = Identity.of(os.getpid()), Identity.of(self.process.pid)
        inner = None if inner_pid is None else Identity.of(inner_pid)
        if worker is None or outer is None or (inner_pid is not None and inner is None):
            return None
        expires = time.time() + lifetime_s + EXPIRY_GRACE_S
        cgroup = None if self.group is None else str(self.group.path)
        return Owned(worker=worker, outer=outer, inner=inner, expires=expires, cgroup=cgroup)

    async def died_of_memory(self) -> bool:
        """Whether the kernel has ended it for want of memory, as far as its control group knows."""
        if self.group is None or self.group.num_killed == 0:
            return False
        return await wait_for_exit(self.process.pid, END_WAIT_S) and self.process.poll() in _KILLED

    async def end(self) -> None:
        """End it in order, and by force where that takes too long. Raises EpisodeError when it does not die."""
        self.stream.close()
        if self.lent is not None:
            self.lent.close()
        if not await wait_for_exit(self.process.pid, END_WAIT_S) and not await self._kill():
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"process {self.process.pid} does not die")
        self.process.wait()
        if self.group is not None and not await asyncio.to_thread(self.group.end):
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"control group {self.group.path} cannot be removed")

    async def _kill(self) -> bool:
        if self.group is not None:
            self.group.kill()
        inner = self.inner()
        # By its parent, since the number may be another process's by now.
        if inner is not None and _parent_of(inner) == self.process.pid:
            with suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
            await wait_for_exit(self.process.pid, INNER_KILL_WAIT_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return await wait_for_exit(self.process.pid, KILL_WAIT_S)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    pass_fds: Sequence[int],
    remarks_fd: int,
    user: int | None = None,
    stdio_fd: int | None = None,
) -> subprocess.Popen[bytes]:
    """In a session of its own. `user`: id of the user and group to run as, None = the worker's own.
    `stdio_fd`: its input and output, None = it has none.

    Raises EpisodeError when it can't be started.
    """
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdio_fd is None else stdio_fd,
            stdout=subprocess.DEVNULL if stdio_fd is None else stdio_fd,
            stderr=remarks_fd,
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


def _parent_of(pid: int) -> int | None:
    try:
        # The name before it, in parentheses, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


async def wait_for_exit(pid: int, timeout_s: float) -> bool:
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
