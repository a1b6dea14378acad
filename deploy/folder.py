"""The data folder of a one-machine stack: its parts, and the lock that keeps a second supervisor out."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import textwrap
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import SetupError
from deploy.procfs import read_stat

MIN_FREE_BYTES = 500_000_000
MAX_COMMAND_CHARS = 120
MAX_HOLDER_BYTES = 4096
HOLDER_WAIT_S = 5.0


class FolderInUse(SetupError):
    """Another process holds the lock."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(
            f"data folder {folder} is in use by process {holder}: wait until it has ended or stop it, "
            "or choose another folder with ROLLMILL_DATA_DIR"
        )
        self.holder = holder
        """Id of the process and its command: 4711 (rollmill psql)."""


class DataFolder:
    """Context manager: made, checked and locked inside the block. The kernel drops the lock when we die."""

    def __init__(self, path: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self.path = path.absolute()
        self.logs = self.path / "logs"
        self.run = self.path / "run"
        self._min_free_bytes = min_free_bytes
        self._lock_fd: int | None = None

    def log_file(self, name: str) -> Path:
        """Where the process of this name writes."""
        return self.logs / f"{name}.log"

    def __enter__(self) -> Self:
        """Raises FolderInUse, and SetupError for a folder that is not writable, or on a full disk."""
        try:
            for folder in (self.path, self.logs, self.run):
                folder.mkdir(parents=True, exist_ok=True)
            self.run.chmod(0o700)
            self._lock_fd = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._lock()
        except FolderInUse:
            self._unlock()
            raise
        except OSError as error:
            raise SetupError(
                f"data folder {self.path} is not writable ({error.strerror}): "
                "give yourself the right, or choose another with ROLLMILL_DATA_DIR"
            ) from None
        self._check_free_space()
        os.ftruncate(self._fd(), 0)
        os.pwrite(self._fd(), f"{os.getpid()} ({_command()})".encode(errors="replace"), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def _fd(self) -> int:
        assert self._lock_fd is not None
        return self._lock_fd

    def _lock(self) -> None:
        """Raise FolderInUse as soon as we know by whom.

        Between taking the lock and naming itself there, a process is without name, or has that of one that has ended:
        we try again until we have the lock or a name that lives, up to HOLDER_WAIT_S. Nobody lives here by the name
        that a process of another container gives.
        """
        deadline = time.monotonic() + HOLDER_WAIT_S
        while True:
            try:
                fcntl.flock(self._fd(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._fd(), MAX_HOLDER_BYTES, 0).decode(errors="replace").strip()
                if _lives(holder.partition(" ")[0]) or time.monotonic() > deadline:
                    raise FolderInUse(self.path, holder or "(without a name)") from None
                time.sleep(0.05)
            else:
                return

    def _unlock(self) -> None:
        os.close(self._fd())
        self._lock_fd = None

    def _check_free_space(self) -> None:
        free = free_bytes(self.path)
        if free < self._min_free_bytes:
            self._unlock()
            raise SetupError(
                f"only {free / 1e6:.0f} MB free for data folder {self.path}, "
                f"{self._min_free_bytes / 1e6:.0f} MB are needed: make room, or choose another with ROLLMILL_DATA_DIR"
            )


def _lives(pid: str) -> bool:
    return pid.isdecimal() and read_stat(int(pid)) is not None


def _command() -> str:
    """This process's command line, short enough for a message."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return textwrap.shorten(command, MAX_COMMAND_CHARS, placeholder=" …")


def free_bytes(path: Path) -> int:
    """What we may still write on the disk of this folder."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


def write_private(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file that only we may read, whole or not at all."""
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    aside.rename(path)


def kept_password(path: Path) -> str:
    """The password in this file, made at the first call: 32 hex digits, safe in a URL."""
    if not path.exists():
        write_private(path, secrets.token_hex(16))
    return path.read_text().strip()
