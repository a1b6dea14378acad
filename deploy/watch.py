"""Watches a run to its end: keeps the stack's processes alive, reads how the run stands, feeds the display."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from common.config import RunConfig
from common.db.session import Database
from common.db.snapshot import Snapshot, take_snapshot
from common.episode import RunState
from common.errors import DatabaseUnavailable, SetupError
from common.settings import masked
from deploy.broker import why_away
from deploy.display import Display
from deploy.progress import History, View, duration, short_failure
from deploy.supervisor import ProcessStatus

READ_EVERY_S = 0.5
READ_SHARE = 0.1
"""Largest part of the time that reading may take: a run of a million episodes is looked at less often."""
POLL_EVERY_S = 0.05
SILENT_AFTER_S = 10.0
JOIN_TIMEOUT_S = 2.0
ASK_BROKER_EVERY_S = 5.0
BROKER_TIMEOUT_S = 2.0


class Stack(Protocol):
    """What keeps processes alive."""

    def poll(self) -> None: ...

    def statuses(self) -> Sequence[ProcessStatus]: ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The last snapshot that could be read."""

    snapshot: Snapshot | None
    """None = none could be read yet."""
    at_s: float
    """When it was read (before the first: when reading began), in seconds of the monotonic clock."""
    error: str | None
    """Why the latest attempt failed; None = it did not."""
    broker_away: str | None = None
    """Which broker cannot be used, and why; None = it can, or it is the stack's own, which is looked after."""


class RunReader:
    """Reads snapshots in a thread of its own: a database that hangs must not keep the stack from being polled.

    In a second one it asks for the broker: one that hangs must not make the figures old. broker_url: None = don't ask.
    """

    def __init__(
        self,
        database: Database,
        run_id: int,
        *,
        broker_url: str | None = None,
        ask_broker_every_s: float = ASK_BROKER_EVERY_S,
    ) -> None:
        self._database = database
        self._run_id = run_id
        self._reading = Reading(snapshot=None, at_s=time.monotonic(), error=None)
        self._stopped = threading.Event()
        self._broker_url = broker_url
        self._ask_broker_every_s = ask_broker_every_s
        self._broker_away: str | None = None
        self._threads = [
            threading.Thread(target=self._read_until_stopped, name="run-reader", daemon=True),
            threading.Thread(target=self._ask_broker_until_stopped, name="broker-asker", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    @property
    def latest(self) -> Reading:
        return replace(self._reading, broker_away=self._broker_away)

    def _read_until_stopped(self) -> None:
        pause_s = 0.0
        while not self._stopped.wait(pause_s):
            started_s = time.monotonic()
            try:
                with self._database.begin() as conn:
                    snapshot = take_snapshot(conn, self._run_id)
                self._reading = Reading(snapshot=snapshot, at_s=time.monotonic(), error=None)
            except DatabaseUnavailable as error:
                self._reading = Reading(snapshot=self._reading.snapshot, at_s=self._reading.at_s, error=str(error))
            pause_s = max(READ_EVERY_S, (time.monotonic() - started_s) / READ_SHARE)

    def _ask_broker_until_stopped(self) -> None:
        if self._broker_url is None:
            return
        while not self._stopped.wait(self._ask_broker_every_s):
            reason = why_away(self._broker_url, timeout_s=BROKER_TIMEOUT_S)
            self._broker_away = None if reason is None else f"{masked(self._broker_url)}: {reason}"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What is watched."""

    config: RunConfig
    data_folder: Path
    started_s: float
    """When the command began, in seconds of the monotonic clock."""
    stall_limit_s: float | None
    """Give up when no figure has changed for so long; None = never: one step of a large model may take an hour."""


def watch(watched: Watched, *, stack: Stack, latest: Callable[[], Reading], display: Display) -> Snapshot:
    """Wait until the run is over, and return how it then stands.

    Waits for the trainer to mark the run. Raises what `stack.poll` raises, and SetupError at the stall limit.
    """
    movement = Movement(watched.config, now_s=time.monotonic())
    while True:
        stack.poll()
        reading, now_s = latest(), time.monotonic()
        movement.note(reading)
        if reading.snapshot is not None and reading.snapshot.error is not None:
            raise SetupError(f"run {watched.config.name} cannot be fed: {reading.snapshot.error}")
        display.show(
            View(
                config=watched.config,
                data_folder=watched.data_folder,
                elapsed_s=now_s - watched.started_s,
                snapshot=reading.snapshot,
                rates=movement.history.rates(),
                processes=stack.statuses(),
                problem=problem_of(reading, now_s=now_s),
            )
        )
        if reading.snapshot is not None and reading.snapshot.state in (RunState.FINISHED, RunState.STOPPED):
            return reading.snapshot
        _raise_if_given_up(watched, reading)
        if watched.stall_limit_s is not None and now_s - movement.moved_s > watched.stall_limit_s:
            raise SetupError(
                f"run {watched.config.name}: no figure has changed for {duration(watched.stall_limit_s)} minutes; "
                f"the logs in {watched.data_folder / 'logs'} say why; the same command goes on from here"
            )
        time.sleep(POLL_EVERY_S)


def _raise_if_given_up(watched: Watched, reading: Reading) -> None:
    if reading.snapshot is None:
        return
    run = watched.config.name
    if reading.snapshot.pause_reason is not None:
        raise SetupError(
            f"run {run} is paused: {reading.snapshot.pause_reason}. Mend the cause, then `rollmill run resume {run}` "
            f"and the same command let it go on; `rollmill run stop {run}` ends it"
        )
    trouble = reading.snapshot.step_trouble
    if trouble is not None and trouble.is_final:
        log_file = watched.data_folder / "logs" / "trainer.log"
        raise SetupError(
            f"run {run}: {trouble}. The traceback is in {log_file}; "
            f"the same command tries it again, `rollmill run stop {run}` ends the run"
        )


class Movement:
    """Tells new snapshots from old ones, and changed ones from those that repeat."""

    def __init__(self, config: RunConfig, *, now_s: float) -> None:
        self.history = History(num_versions=config.train.num_versions)
        self.moved_s = now_s
        """When a figure changed the last time, or the run was seen paused."""
        self._seen: Snapshot | None = None

    def note(self, reading: Reading) -> None:
        """Take in the latest reading, new or not."""
        if reading.snapshot is None or reading.snapshot is self._seen:
            return
        # What an engine complains of may be worded anew at each try.
        before = self._seen and replace(self._seen, engine_trouble=reading.snapshot.engine_trouble)
        if reading.snapshot != before or reading.snapshot.state is RunState.PAUSED:
            self.moved_s = reading.at_s
        self.history.add(reading.at_s, reading.snapshot)
        self._seen = reading.snapshot


def problem_of(reading: Reading, *, now_s: float) -> str | None:
    """What is wrong with the figures on the screen, or with what moves them; None = nothing."""
    age_s = now_s - reading.at_s
    problems = []
    if reading.error is not None:
        problems.append(f"the database does not answer ({reading.error}): figures are {age_s:.0f} s old")
    elif age_s > SILENT_AFTER_S and reading.snapshot is not None:
        problems.append(f"the database takes its time: figures are {age_s:.0f} s old")
    if reading.snapshot is not None and reading.snapshot.pause_reason is not None:
        problems.append(short_failure(f"paused: {reading.snapshot.pause_reason}"))
    if reading.snapshot is not None and reading.snapshot.step_trouble is not None:
        problems.append(short_failure(str(reading.snapshot.step_trouble)))
    if reading.snapshot is not None and reading.snapshot.engine_trouble is not None:
        problems.append(short_failure(reading.snapshot.engine_trouble))
    if reading.broker_away is not None:
        problems.append(f"broker away: {reading.broker_away}")
    return "; ".join(problems) or None
