"""How long the command server looks at the memory of many processes before it looks at anything else."""

from __future__ import annotations

import time
from typing import cast

from workers.sandbox.inside.processes import LOOK_S, Memory, ProcStat


class Slow:
    """A process whose memory takes as long to ask for as one look may last."""

    def __init__(self, pid: int, *, resident_bytes: int, unshared_bytes: int) -> None:
        self.pid = pid
        self.resident_bytes = resident_bytes
        self.num_asked = 0
        self._unshared_bytes = unshared_bytes

    def unshared_bytes(self) -> int:
        self.num_asked += 1
        done = time.monotonic() + 1.1 * LOOK_S
        while time.monotonic() < done:
            pass
        return self._unshared_bytes


def looks(processes: list[Slow], num: int) -> list[bool]:
    memory = Memory()
    return [memory.is_over(cast("list[ProcStat]", processes), 100) for _ in range(num)]


def test_a_look_is_short_and_the_next_one_goes_on_from_there() -> None:
    processes = [Slow(pid, resident_bytes=90, unshared_bytes=40) for pid in (2, 3, 4)]
    assert looks(processes, 2) == [False, False]
    assert [process.num_asked for process in processes] == [1, 1, 0]
    assert looks(processes, 3) == [False, False, True]


def test_the_largest_is_asked_first() -> None:
    processes = [Slow(2, resident_bytes=10, unshared_bytes=0), Slow(3, resident_bytes=200, unshared_bytes=150)]
    assert looks(processes, 1) == [True]
    assert [process.num_asked for process in processes] == [0, 1]


def test_shared_memory_is_asked_for_again_when_all_of_it_was_known() -> None:
    processes = [Slow(pid, resident_bytes=90, unshared_bytes=20) for pid in (2, 3)]
    assert looks(processes, 4) == [False] * 4
    assert [process.num_asked for process in processes] == [2, 2]


def test_nothing_is_asked_for_what_is_small() -> None:
    processes = [Slow(2, resident_bytes=50, unshared_bytes=50), Slow(3, resident_bytes=50, unshared_bytes=50)]
    assert looks(processes, 1) == [False]
    assert [process.num_asked for process in processes] == [0, 0]
