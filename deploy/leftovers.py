"""Processes that a killed supervisor left behind: recorded in the data folder, ended at the next start."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import SetupError
from deploy.folder import write_private
from deploy.procfs import ProcStat, all_stats, boot_id, has_variable, read_stat

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PidRecord:
    """Names one started process for ever: a pid alone may long belong to somebody else."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    stop_signal: int

    def is_alive(self) -> bool:
        stat = read_stat(self.pid)
        return (
            stat is not None
            and not stat.is_zombie
            and stat.start_ticks == self.start_ticks
            and self.boot_id == boot_id()
        )


def mark_of(data_dir: Path) -> str:
    """NAME=VALUE in the environment of everything that runs for this data folder."""
    stat = data_dir.stat()
    return f"SUPERVISED_BY=rollmill:{stat.st_dev}:{stat.st_ino}"


def write_record(run_dir: Path, *, name: str, pid: int, stop_signal: int) -> None:
    """Note a process that was just started."""
    stat = read_stat(pid)
    if stat is not None:
        record = PidRecord(name=name, pid=pid, start_ticks=stat.start_ticks, boot_id=boot_id(), stop_signal=stop_signal)
        write_private(run_dir / f"{name}.pid", json.dumps(asdict(record)))


def remove_record(run_dir: Path, name: str) -> None:
    (run_dir / f"{name}.pid").unlink(missing_ok=True)


def end_leftovers(run_dir: Path, *, mark: str) -> int:
    """End what earlier supervisors of this folder left running; gives the number of processes ended.

    First the recorded ones, by their own stop signal: a database may be in the middle of its shutdown. Then, by
    SIGKILL, everything that shares a session or group with them or bears the mark.
    """
    records = _read_records(run_dir)
    alive = [record for record in records if record.is_alive()]
    family = _family(alive, mark=mark)
    for record in alive:
        logger.warning(
            "process=%s pid=%d is left from a supervisor that was killed; ending it", record.name, record.pid
        )
        _send(record.pid, record.stop_signal)
    _wait_until_gone({record.pid for record in alive}, timeout_s=STOP_TIMEOUT_S)
    rest = {pid for pid, start_ticks in family.items() if _is_same(pid, start_ticks)} | set(_family([], mark=mark))
    for pid in rest:
        _send(pid, signal.SIGKILL)
    if stubborn := _wait_until_gone(rest, timeout_s=KILL_TIMEOUT_S):
        raise SetupError(f"processes {sorted(stubborn)} are left from an earlier start and cannot be ended: end them")
    for record in records:
        remove_record(run_dir, record.name)
    return len(family)


def _read_records(run_dir: Path) -> list[PidRecord]:
    records = []
    for file in run_dir.glob("*.pid"):
        try:
            records.append(PidRecord(**json.loads(file.read_text())))
        except (ValueError, TypeError):
            logger.warning("pid file %s is damaged; removing it", file)
            file.unlink()
    return records


def _family(alive: Collection[PidRecord], *, mark: str) -> dict[int, int]:
    """Start times by pid of the recorded processes, of their sessions and groups, and of all that bear the mark."""
    leaders = {record.pid for record in alive}
    return {stat.pid: stat.start_ticks for stat in all_stats() if _belongs(stat, leaders, mark)}


def _belongs(stat: ProcStat, leaders: Collection[int], mark: str) -> bool:
    if stat.is_zombie or stat.pid == os.getpid():
        return False
    return stat.session in leaders or stat.pgrp in leaders or has_variable(stat.pid, mark)


def _is_same(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.is_zombie and stat.start_ticks == start_ticks


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_until_gone(pids: Collection[int], *, timeout_s: float) -> set[int]:
    """Wait for the end of the processes; gives those that still run at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        running = {pid for pid in pids if (stat := read_stat(pid)) is not None and not stat.is_zombie}
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.02)
