"""Control groups v2 of sandboxes that are processes of the worker's: limits by the kernel, and one end for all in it.

Only where a folder of groups is the worker's to write; elsewhere the command server watches and counts (rlimits).
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import SetupError
from workers.sandbox.protocol import Limits

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NEEDED = ("memory", "pids")
"""Controllers without which there is no use in a group; `cpu` is taken where it is there."""
SLACK_BYTES = 128 << 20
SLACK_PROCESSES = 8
"""Bubblewrap's own, and the server."""
PERIOD_US = 100_000
CPU_WEIGHT = 25
"""Of 100 that others have: commands must not keep the machine's services waiting."""
END_WAIT_S, END_POLL_S = 5.0, 0.005
EVENTS = "memory.events"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group of one sandbox."""

    path: Path

    @property
    def entrance(self) -> Path:
        """Who writes 0 to it is in the group, with all that it starts."""
        return self.path / "cgroup.procs"

    @property
    def events(self) -> Path:
        """What its memory has met."""
        return self.path / EVENTS

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has ended for want of memory."""
        with suppress(OSError):
            for line in self.events.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def kill(self) -> None:
        """All processes in it at once, during which none can fork. Nothing if it is gone."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def end(self, *, wait_s: float = END_WAIT_S) -> bool:
        """Kill what is in it and remove it; whether it is gone."""
        deadline = time.monotonic() + wait_s
        while True:
            self.kill()
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return True
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(END_POLL_S)
            else:
                return True


@dataclass(frozen=True, kw_only=True)
class Groups:
    """A folder of groups in which the worker makes one for each sandbox."""

    folder: Path

    def make(self, handle: str, limits: Limits) -> Group:
        """A group with these limits. Raises OSError."""
        group = Group(path=self.folder / f"rollmill-{handle}-{os.getpid()}-{secrets.token_hex(4)}")
        group.path.mkdir()
        try:
            for name, value in settings_of(limits).items():
                file = group.path / name
                if file.exists() or name in ("memory.max", "pids.max"):
                    file.write_text(value)
        except OSError:
            group.end()
            raise
        return group

    def prepare(self) -> str | None:
        """Turn on its controllers; why that, or making groups, can't be done, None = it can."""
        if not (self.folder / "cgroup.procs").exists():
            return f"{self.folder} is no control group (v2)"
        try:
            there = (self.folder / "cgroup.controllers").read_text().split()
            missing = [name for name in NEEDED if name not in there]
            if missing:
                return f"{self.folder} has no controllers {', '.join(missing)}: delegate them (systemd: Delegate=yes)"
            wanted = [name for name in (*NEEDED, "cpu") if name in there]
            control = self.folder / "cgroup.subtree_control"
            if not set(wanted) <= set(control.read_text().split()):
                control.write_text(" ".join(f"+{name}" for name in wanted))
            self.make("0-1", Limits()).end()
        except OSError as error:
            return f"{self.folder} is not the worker's to use, or holds processes itself: {error.strerror}"
        return None


def settings_of(limits: Limits) -> dict[str, str]:
    """The group's files and what is written to them.

    The server's own look comes first, so that the agent is told which limit it met; the disk lies in memory.
    """
    return {
        "memory.max": str(limits.memory_bytes + limits.disk_bytes + SLACK_BYTES),
        "memory.swap.max": "0",
        "pids.max": str(limits.num_processes + SLACK_PROCESSES),
        "cpu.max": f"{int(limits.cpus * PERIOD_US)} {PERIOD_US}",
        "cpu.weight": str(CPU_WEIGHT),
    }


def find_groups(given: Path | None, *, own: Path = OWN, root: Path = ROOT, is_root: bool | None = None) -> Groups | str:
    """The folder of the settings, else the one around the worker's own group; or why there is none.

    Raises SetupError when the one that was given can't be used.
    """
    if given is not None:
        groups = Groups(folder=given)
        trouble = groups.prepare()
        if trouble is not None:
            raise SetupError(f"ROLLMILL_SANDBOX_CGROUP: {trouble}")
        return groups
    if not (root / "cgroup.controllers").exists():
        return "control groups are v1 here"
    if os.geteuid() == 0 if is_root is None else is_root:
        return "root may write to all of them, so which is the worker's must be said: ROLLMILL_SANDBOX_CGROUP"
    lines = own.read_text().splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    if not path:
        return "the worker is in no control group of its own"
    groups = Groups(folder=(root / path).parent)
    return groups.prepare() or groups
