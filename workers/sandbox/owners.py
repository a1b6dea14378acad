"""Which processes belong to a sandbox, in files on its node: so that any process of the node can end exactly those.

A process is known by its boot, its process namespace, its number and its start: a number alone may be another's by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.cgroup import Group

END_WAIT_S = 1.0
KILL_WAIT_S = 5.0
EXPIRY_GRACE_S = 60.0
"""The worker ends what has expired itself; the sweep is for workers that hang."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process and no other."""

    boot: str
    """The kernel's id of this start of the machine, and the number of the process namespace."""
    pid: int
    started: int
    """In clock ticks since the machine's start."""

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Of a process that this one can see; None = it is gone."""
        started = _started(pid)
        return None if started is None else cls(boot=_boot(), pid=pid, started=started)

    @property
    def is_foreign(self) -> bool:
        """Whether it is, or was, in a process namespace that this process does not see into."""
        return self.boot != _boot()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; only where it is not foreign."""
        return _started(self.pid) == self.started

    @contextmanager
    def handle(self) -> Iterator[int | None]:
        """A pidfd of this very process; None = it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Looked at after the handle was taken: from now on the number is nobody else's.
            yield handle if _started(self.pid) == self.started else None
        finally:
            os.close(handle)

    def end(self, number: signal.Signals, *, wait_s: float) -> bool:
        """Send a signal and wait; whether the process has ended."""
        with self.handle() as handle:
            if handle is None:
                return True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            return bool(poller.poll(wait_s * 1000))


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A sandbox's processes, and whose they are."""

    worker: Identity
    """It started them, and they end with it."""
    outer: Identity
    """The worker's child."""
    inner: Identity | None
    """The sandbox's own first process: with it all others end, and `outer` after it. None = there are no walls."""
    expires: float | None = None
    """In seconds of Unix time: the sweep ends what is older, its worker alive or not. None = never."""

    cgroup: str | None = None
    """Folder of the control group that they are in; None = there is none."""

    def is_lost(self, now: float) -> bool:
        """Whether nobody needs it any more; only where it is not foreign. `now` in seconds of Unix time."""
        return not self.worker.is_alive or (self.expires is not None and now > self.expires)

    def end(self) -> bool:
        """Whether nothing is left of them."""
        return self._end_processes() and (self.cgroup is None or Group(path=Path(self.cgroup)).end())

    def _end_processes(self) -> bool:
        if self.inner is not None:
            self.inner.end(signal.SIGKILL, wait_s=KILL_WAIT_S)
            return self.outer.end(signal.SIGTERM, wait_s=END_WAIT_S) or self._kill()
        # Without walls, only the server can find the processes of its commands.
        return self.outer.end(signal.SIGTERM, wait_s=KILL_WAIT_S) or self._kill()

    def _kill(self) -> bool:
        return self.outer.end(signal.SIGKILL, wait_s=KILL_WAIT_S)


class Record:
    """The note of a sandbox's processes, locked as long as the worker lives that started them."""

    def __init__(self, file: Path, lock_fd: int) -> None:
        self.file = file
        self._lock_fd = lock_fd

    def remove(self) -> None:
        """The processes have ended."""
        self.file.unlink(missing_ok=True)
        os.close(self._lock_fd)


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The records of a node, each in a file of its own: `<handle>.<number of the outer process>`."""

    root: Path

    def record(self, handle: str, owned: Owned) -> Record:
        """Note processes of a sandbox; whole or not at all."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        file = self.root / f"{handle}.{owned.outer.pid}"
        fresh = self.root / f".{file.name}"
        lock_fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        os.write(lock_fd, json.dumps(asdict(owned)).encode())
        fresh.rename(file)
        return Record(file, lock_fd)

    def of(self, handle: str) -> dict[Path, Owned]:
        """The records of a sandbox."""
        found = {}
        for file in self.root.glob(f"{handle}.*"):
            with suppress(FileNotFoundError):
                found[file] = _owned(json.loads(file.read_text()))
        return found

    def end(self, handle: str) -> None:
        """End all processes of a sandbox. Raises EpisodeError when one does not die, or can't be reached from here."""
        for file, owned in self.of(handle).items():
            self._end(handle, file, owned)

    def sweep(self) -> int:
        """End what has expired, and what a dead worker left; how many sandboxes. Raises EpisodeError.

        Of a worker in another process namespace only a reaper in that can end anything.
        """
        now = time.time()
        found = [
            (handle, file, owned)
            for handle in {file.name.partition(".")[0] for file in self.root.glob("[0-9]*")}
            for file, owned in self.of(handle).items()
            if (_worker_is_gone(file) if owned.outer.is_foreign else owned.is_lost(now))
        ]
        for handle, file, owned in found:
            self._end(handle, file, owned)
        return len(found)

    def _end(self, handle: str, file: Path, owned: Owned) -> None:
        if owned.outer.is_foreign:
            # Of an earlier boot, or of another container: with its worker, which held the lock, it has ended.
            if not _worker_is_gone(file):
                raise EpisodeError(
                    Outcome.SANDBOX_FAILED,
                    f"sandbox {handle} runs in another process namespace: start a reaper beside the fleet there",
                )
        elif not owned.end():
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"process {owned.outer.pid} of sandbox {handle} does not die")
        file.unlink(missing_ok=True)


def _worker_is_gone(file: Path) -> bool:
    try:
        with file.open() as record:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True


def _owned(fields: dict[str, Any]) -> Owned:
    def identity(name: str) -> Identity | None:
        given = fields[name]
        if given is None:
            return None
        return Identity(boot=str(given["boot"]), pid=int(given["pid"]), started=int(given["started"]))

    worker, outer = identity("worker"), identity("outer")
    assert worker is not None
    assert outer is not None
    left = {name: fields.get(name) for name in ("expires", "cgroup")}
    return Owned(worker=worker, outer=outer, inner=identity("inner"), **left)


@cache
def _boot() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """When the process started; None = it is gone. A zombie has ended, too."""
    try:
        # The name before it, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
