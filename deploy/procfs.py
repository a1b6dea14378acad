"""What Linux tells about processes under /proc: who they are, who started them, and when. Read by the supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcStat:
    """One process, as /proc/PID/stat gives it."""

    pid: int
    state: str
    """One letter; Z is a process that has ended and waits to be reaped."""
    ppid: int
    pgrp: int
    session: int
    start_ticks: int
    """Start time in clock ticks since boot; with the pid and the boot id it names a process for ever."""

    @property
    def is_zombie(self) -> bool:
        return self.state in "ZX"


def read_stat(pid: int) -> ProcStat | None:
    """The process with this pid; None = there is none."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name may hold spaces and brackets, so fields are counted from its last bracket.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcStat(
        pid=pid,
        state=fields[0],
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def all_stats() -> Iterator[ProcStat]:
    """Every process that we can see, zombies included."""
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (stat := read_stat(int(entry.name))) is not None:
            yield stat


def boot_id() -> str:
    """Changes with every boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def has_variable(pid: int, assignment: str) -> bool:
    """Whether the process was started with NAME=VALUE in its environment; False where we may not look."""
    try:
        environ = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return assignment.encode() in environ.split(b"\0")


def working_folder(pid: int) -> Path | None:
    """The folder in which the process works; None = gone, or we may not look."""
    try:
        return (PROC / str(pid) / "cwd").readlink()
    except OSError:
        return None
