"""Keeps the processes of a one-machine stack alive, and ends all of them with itself, whatever happens.

Everything runs on the main thread: the kernel kills a child when the *thread* that started it ends, so processes are
also restarted from `poll()`, which the caller's display loop calls several times a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from signal import Signals
from types import FrameType, TracebackType
from typing import Self

from common.errors import RollmillError, SetupError
from deploy.crash_policy import CrashPolicy
from deploy.folder import DataFolder
from deploy.leftovers import end_leftovers, mark_of, remove_record, write_record
from deploy.process import Process, ProcessSpec, Restart
from deploy.procfs import all_stats, read_stat

logger = logging.getLogger(__name__)

POLL_S = 0.02
KILLED_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 10.0
REAP_EVERY_S = 1.0
ASK_EVERY_S = 1.0
PR_SET_CHILD_SUBREAPER = 36


class StopRequested(RollmillError):
    """Somebody asked the supervisor to stop, by Ctrl-C or a signal."""

    def __init__(self, number: Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


class State(StrEnum):
    """Where a supervised process stands."""

    STARTING = "starting"
    """It runs, and has not yet said that it is ready."""
    UP = "up"
    """It runs and was ready."""
    WAITING = "waiting"
    """It ended; it is started again after a pause."""
    FINISHED = "finished"
    """It ended with exit code 0, which was its purpose."""
    STOPPED = "stopped"
    """We ended it."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """A supervised process for people's eyes."""

    name: str
    state: State
    pid: int
    """The last one, where it does not run now."""
    restarts: int
    start_s: float | None
    """From its last start to readiness; None = not ready yet."""
    last_exit: str | None
    """How it ended the last time, in words; None = never."""
    last_words: str | None
    """The last line of its log when it ended with an error the last time; None = it did not, or said nothing."""

    @property
    def last_end(self) -> str | None:
        """How it ended the last time, and what it said; None = it never did, or that was its purpose."""
        if self.last_exit is None or self.state is State.FINISHED:
            return None
        return self.last_exit if self.last_words is None else f"{self.last_exit}: {self.last_words}"


class Unit:
    """One process over its restarts."""

    def __init__(self, spec: ProcessSpec, process: Process) -> None:
        self.spec = spec
        self.process = process
        self.state = State.STARTING
        self.restarts = 0
        self.row: list[int] = []
        """Exit codes of its ends in a row."""
        self.restart_at = 0.0
        self.start_s: float | None = None
        self.last_exit: str | None = None
        self.last_words: str | None = None
        self.killed_for: str | None = None
        """What its process did to be killed by us; None = it was not."""
        self._asked_at = 0.0
        self._answered_at = 0.0
        """Both of time.monotonic, while it is UP."""

    @property
    def runs(self) -> bool:
        return self.state in (State.STARTING, State.UP)

    def status(self) -> ProcessStatus:
        return ProcessStatus(
            name=self.spec.name,
            state=self.state,
            pid=self.process.pid,
            restarts=self.restarts,
            start_s=self.start_s,
            last_exit=self.last_exit,
            last_words=self.last_words,
        )

    def check_ready(self) -> None:
        """STARTING becomes UP when the readiness check says yes."""
        if self.state is State.STARTING and (self.spec.ready is None or self.spec.ready()):
            self.state = State.UP
            self._asked_at = self._answered_at = time.monotonic()
            self.start_s = time.monotonic() - self.process.started_at
            logger.info("process=%s pid=%d is up after %.2f s", self.spec.name, self.process.pid, self.start_s)

    def lived_s(self) -> float:
        """Since it was ready, 0 where it is not yet; since its start where nobody can tell when it is."""
        ran_s = time.monotonic() - self.process.started_at
        if self.spec.ready is None:
            return ran_s
        return 0.0 if self.start_s is None else ran_s - self.start_s

    def is_late(self) -> bool:
        waited_s = time.monotonic() - self.process.started_at
        return self.state is State.STARTING and waited_s > self.spec.ready_timeout_s

    def is_lost(self) -> bool:
        """Whether it was up and no longer answers; it is asked once in ASK_EVERY_S."""
        spec, now = self.spec, time.monotonic()
        if self.state is not State.UP or spec.lost_after_s is None or spec.ready is None:
            return False
        if now - self._asked_at < ASK_EVERY_S:
            return False
        if spec.ready():
            self._answered_at = now
        self._asked_at = time.monotonic()
        return now - self._answered_at > spec.lost_after_s

    def kill(self, what_it_did: str) -> None:
        """End its process, which is started again."""
        logger.warning("process=%s %s; killing it", self.spec.name, what_it_did)
        self.killed_for = what_it_did
        self.process.kill_group()

    def failure(self, what: str) -> SetupError:
        """The error that names the process, its log and the log's last lines."""
        return SetupError(f"{self.spec.name} {what}; its log: {self.process.log_file}\n{self.process.log_tail()}")


class Supervisor:
    """Context manager over a locked data folder; leaving the block stops everything, last started first."""

    def __init__(self, folder: DataFolder, *, crash_policy: CrashPolicy | None = None) -> None:
        self.folder = folder
        self.stop_signal: Signals | None = None
        """The first signal that asked us to stop; None = none yet."""
        self._policy = crash_policy or CrashPolicy()
        self._mark = mark_of(folder.path)
        self._layers: list[list[Unit]] = []
        self._signals_seen = 0
        self._reaped_at = 0.0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """End leftovers of a killed supervisor, take over signals, adopt orphans of our children from now on."""
        assert threading.current_thread() is threading.main_thread(), "the supervisor needs the main thread"
        if sys.platform != "linux":
            raise SetupError("the one-machine stack needs Linux: use a virtual machine or a container")
        end_leftovers(self.folder.run, mark=self._mark)
        _adopt_orphans(1)
        self._undo.callback(_adopt_orphans, 0)
        for number in (Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP):
            if number is Signals.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the user wants us to outlive the terminal
            self._undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._undo:
            self.stop()

    def start(self, *specs: ProcessSpec) -> None:
        """Start the processes together and wait until all are ready."""
        self.launch(*specs)
        self.wait_ready()

    def launch(self, *specs: ProcessSpec) -> None:
        """Start the processes as one layer: they are stopped together, before all that started earlier."""
        layer: list[Unit] = []
        self._layers.append(layer)
        for spec in specs:
            layer.append(Unit(spec, self._spawn(spec)))

    def wait_ready(self, tell: Callable[[float], None] = lambda waited_s: None) -> None:
        """Wait for all that was launched; `tell` is called again and again with the seconds so far.

        Raises SetupError at the first that ends or is late, StopRequested on a signal.
        """
        started = time.monotonic()
        while True:
            self._raise_if_stopped()
            tell(time.monotonic() - started)
            starting = [unit for unit in self._units() if unit.state is State.STARTING]
            for unit in starting:
                exit_code = unit.process.exit_code()
                if exit_code is not None:
                    raise unit.failure(f"{unit.process.explain_end(exit_code)} before it was ready")
                unit.check_ready()
                if unit.is_late():
                    raise unit.failure(f"was not ready within {unit.spec.ready_timeout_s:.0f} s")
            if not any(unit.state is State.STARTING for unit in starting):
                return
            time.sleep(POLL_S)

    def poll(self) -> None:
        """Reap, restart, note readiness. Raises SetupError when a process is given up, StopRequested on a signal."""
        assert threading.current_thread() is threading.main_thread(), "children die with the thread that starts them"
        self._raise_if_stopped()
        for unit in self._units():
            self._advance(unit)
        if time.monotonic() - self._reaped_at > REAP_EVERY_S:
            self._reaped_at = time.monotonic()
            self._reap_adopted()

    def statuses(self) -> list[ProcessStatus]:
        """All processes in the order of their start."""
        return [unit.status() for unit in self._units()]

    def stop(self) -> None:
        """End everything, last layer first. Waits at most the layers' stop_timeout_s; afterwards nothing is left."""
        for layer in reversed(self._layers):
            self._stop_layer(layer)
        self._end_adopted()

    def _units(self) -> list[Unit]:
        return [unit for layer in self._layers for unit in layer]

    def _spawn(self, spec: ProcessSpec) -> Process:
        process = Process(spec, log_file=self.folder.log_file(spec.name), mark=self._mark)
        write_record(self.folder.run, name=spec.name, pid=process.pid, stop_signal=spec.stop_signal)
        return process

    def _advance(self, unit: Unit) -> None:
        if unit.runs:
            exit_code = unit.process.exit_code()
            if exit_code is not None:
                self._note_end(unit, exit_code)
            elif unit.is_late():
                unit.kill(f"was not ready within {unit.spec.ready_timeout_s:g} s")
            elif unit.is_lost():
                unit.kill(f"did not answer for {unit.spec.lost_after_s:g} s")
            else:
                unit.check_ready()
        elif unit.state is State.WAITING and time.monotonic() >= unit.restart_at:
            unit.process = self._spawn(unit.spec)
            unit.restarts += 1
            unit.start_s = None
            unit.killed_for = None
            unit.state = State.STARTING

    def _note_end(self, unit: Unit, exit_code: int) -> None:
        unit.last_exit = unit.process.explain_end(exit_code, killed_for=unit.killed_for)
        unit.last_words = unit.process.last_line() if exit_code > 0 else None
        # What it left behind may hold its port or its files, so that goes before a restart.
        self._end_adopted()
        remove_record(self.folder.run, unit.spec.name)
        if exit_code == 0 and unit.spec.restart is Restart.ON_FAILURE:
            unit.state = State.FINISHED
            logger.info("process=%s is finished", unit.spec.name)
            return
        is_soon = self._policy.is_soon(exit_code, unit.lived_s())
        unit.row = [*unit.row, exit_code] if is_soon else [exit_code]
        if self._policy.is_enough(unit.row):
            raise unit.failure(f"{unit.last_exit}, {len(unit.row)} times in a row")
        pause_s = min(self._policy.backoff_s * 2 ** min(len(unit.row) - 1, 40), MAX_BACKOFF_S)
        unit.state = State.WAITING
        unit.restart_at = time.monotonic() + pause_s
        logger.warning("process=%s %s; starting it again in %.2f s", unit.spec.name, unit.status().last_end, pause_s)

    def _stop_layer(self, layer: list[Unit]) -> None:
        stopping = [unit for unit in layer if unit.runs]
        for unit in stopping:
            unit.process.ask_to_stop()
        asked_at = time.monotonic()
        while left := [unit for unit in stopping if unit.process.exit_code() is None]:
            for unit in left:
                if self._signals_seen > 1 or time.monotonic() - asked_at > unit.spec.stop_timeout_s:
                    logger.warning("process=%s did not stop; killing it", unit.spec.name)
                    unit.process.kill_group()
                    _wait_for_end(unit.process)
            time.sleep(POLL_S)
        for unit in layer:
            if unit.state is not State.FINISHED:
                unit.state = State.STOPPED
            remove_record(self.folder.run, unit.spec.name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks, the second kills all at once, the third also gives up on ourselves."""
        self._signals_seen += 1
        if self.stop_signal is None:
            self.stop_signal = Signals(number)
        if self._signals_seen > 1:
            for unit in self._units():
                if unit.runs:
                    unit.process.kill_group()
        if self._signals_seen > 2:
            os._exit(128 + number)

    def _raise_if_stopped(self) -> None:
        if self.stop_signal is not None:
            raise StopRequested(self.stop_signal)

    def _adopted(self) -> list[int]:
        """Offspring of our children whose own parent has ended.

        They never share our session, as each of our children opens its own; our caller's children do.
        """
        ours = {unit.process.pid for unit in self._units() if unit.runs}
        me, my_session = os.getpid(), os.getsid(0)
        return [
            stat.pid for stat in all_stats() if stat.ppid == me and stat.session != my_session and stat.pid not in ours
        ]

    def _reap_adopted(self) -> None:
        for pid in self._adopted():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _end_adopted(self) -> None:
        """SIGKILL adopted processes; their own children are adopted in turn, so repeat until there are none."""
        deadline = time.monotonic() + KILLED_TIMEOUT_S
        while (pids := self._adopted()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(POLL_S / 10)


def _wait_for_end(process: Process) -> None:
    deadline = time.monotonic() + KILLED_TIMEOUT_S
    while process.exit_code() is None:
        if time.monotonic() > deadline:
            stat = read_stat(process.pid)
            raise SetupError(f"process {process.pid} ({process.spec.name}) cannot be killed; state {stat}")
        time.sleep(POLL_S)


def _adopt_orphans(on: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0)
