"""The processes of a sandbox and what they use, as /proc shows it."""

from __future__ import annotations

import os
import resource
import time

OUT_OF_MEMORY = ("/.sandbox/memory.events", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LOOK_S = 0.1
"""For one look at the memory of many processes: the kernel takes milliseconds for each GB that one of them maps."""


class ProcStat:
    """One process as /proc shows it."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when it is gone."""
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.is_zombie = fields[0] in (b"Z", b"X")
        self.parent = int(fields[1])
        self.cpu_s = sum(map(int, fields[11:15])) / _CLOCK_TICKS
        """Its own time and that of its children that have ended."""
        self.num_threads = int(fields[17])
        self.resident_bytes = int(fields[21]) * _PAGE_BYTES

    def unshared_bytes(self) -> int:
        """Memory that it has alone, and its part of what it shares; what maps files is not counted."""
        sizes: dict[bytes, int] = {}
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb") as file:
                for line in file:
                    words = line.split()
                    if words[0].startswith(b"Pss"):
                        sizes[words[0]] = int(words[1]) << 10
        except OSError:
            # A process may hide it. Then all of it counts.
            return self.resident_bytes
        return sizes.get(b"Pss:", 0) - sizes.get(b"Pss_File:", 0)


class Memory:
    """What all processes of a command hold together; where that is slow to ask for, told over several looks."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def is_over(self, processes: list[ProcStat], most_bytes: int) -> bool:
        """Whether they hold more; no, as long as what is not yet known decides it."""
        # Forked processes share pages, and each of them counts those as its own: ask for the parts, which is slow.
        if sum(process.resident_bytes for process in processes) <= most_bytes:
            self._known.clear()
            return False
        deadline = time.monotonic() + LOOK_S
        unknown = [process for process in processes if process.pid not in self._known]
        unknown.sort(key=lambda process: -process.resident_bytes)
        while unknown:
            process = unknown.pop(0)
            self._known[process.pid] = process.unshared_bytes()
            if time.monotonic() > deadline:
                break
        held = sum(self._known.get(process.pid, 0) for process in processes)
        if not unknown:
            self._known.clear()
        return held > most_bytes


def all_processes() -> list[ProcStat]:
    """Every process but the server and the dead ones."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                process = ProcStat(int(name))
            except OSError:
                continue
            if not process.is_zombie:
                found.append(process)
    return found


def killed_for_memory() -> int:
    """Processes that the kernel has ended at the limit of the sandbox's control group, where it sees one."""
    for name in OUT_OF_MEMORY:
        try:
            with open(name) as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except OSError:
            continue
    return 0


def reaped_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
