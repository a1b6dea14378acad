"""One trainer for a run: a lock that is its connection's, so that one that was killed leaves none behind.

The trainer holds it for as long as it lives, and sees before each thing that it writes that it still does.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any, Self

from sqlalchemy import Connection, Row, text

from common.db import steps
from common.db.runs import Run
from common.db.session import Database
from common.db.steps import Step
from common.errors import DatabaseUnavailable, SetupError

logger = logging.getLogger(__name__)

TRAINER_LOCK = 7_261_006
"""Class of the locks; a run's id is the other half of its own."""
WAIT_S = 30.0
"""Longer than Postgres takes to see that the trainer before, or its machine, is gone."""
POLL_S = 0.1
_KEEPALIVES = {"tcp_keepalives_idle": 5, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""Seconds, seconds, probes: how Postgres sees that a machine is gone, which it otherwise does in hours."""


class RunTaken(SetupError):
    """Another trainer has the run. Nothing may be written for it here."""


class RunLock:
    """A run's lock, of which this process wants to be the holder: within its block, or from `hold` to `close`."""

    def __init__(self, database: Database, run: Run, *, wait_s: float = WAIT_S) -> None:
        """`wait_s` = how long it waits for another holder to end."""
        self._database = database
        self._run = run
        self._wait_s = wait_s
        self._conn: Connection | None = None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self) -> bool:
        """True, with the lock held: taken now, or again after the connection was lost, or still.

        Waits for another holder to let it go; then raises RunTaken, which names it. Raises DatabaseUnavailable.
        """
        if self._conn is not None:
            try:
                with self._database.translating_errors():
                    self._conn.execute(text("SELECT 1"))
                return True
            except DatabaseUnavailable as error:
                logger.warning("the trainer's lock is lost, taking it again run=%d: %s", self._run.id, error)
                self.close()
        conn = self._database.lasting()
        try:
            with self._database.translating_errors():
                self._take(conn)
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        return True

    def may_write(self, step: Step) -> bool:
        """Whether what the step made may be written: this is the run's trainer, and the step is open.

        False = the run was stopped, and the step dropped with it. Raises as `hold` does, and SetupError if another
        trainer has finished the step and let the lock go.
        """
        self.hold()
        with self._database.begin() as conn:
            return steps.is_open(conn, step)

    def close(self) -> None:
        """Let the lock go, if it is held, with its connection."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _take(self, conn: Connection) -> None:
        settings = {**_KEEPALIVES, "application_name": f"rollmill trainer {os.getpid()}@{socket.gethostname()}"}
        for name, value in settings.items():
            conn.execute(text("SELECT set_config(:name, :value, false)"), {"name": name, "value": str(value)})
        key = {"class": TRAINER_LOCK, "run_id": self._run.id}
        deadline = time.monotonic() + self._wait_s
        is_told = False
        while not conn.execute(text("SELECT pg_try_advisory_lock(:class, :run_id)"), key).scalar_one():
            holder = _holder(conn, key)
            if time.monotonic() >= deadline:
                raise RunTaken(_refusal(self._run, holder))
            if not is_told:
                logger.warning("waiting %.0f s for the run's other trainer to end run=%d", self._wait_s, self._run.id)
                is_told = True
            time.sleep(POLL_S)


def _holder(conn: Connection, key: dict[str, int]) -> Row[Any] | None:
    """The connection that has the lock; None = it has let it go meanwhile."""
    return conn.execute(
        text(
            """
            SELECT l.pid, a.application_name, a.client_addr, a.backend_start
              FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
             WHERE l.locktype = 'advisory' AND l.classid = :class AND l.objid = :run_id AND l.objsubid = 2 AND l.granted
               AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            """
        ),
        key,
    ).first()


def _refusal(run: Run, holder: Row[Any] | None) -> str:
    if holder is None:
        return f"run {run.name} has had another trainer until now. Start one trainer for a run"
    since = "" if holder.backend_start is None else f" since {holder.backend_start:%Y-%m-%d %H:%M:%S %Z}"
    return (
        f"run {run.name} has another trainer: {holder.application_name!r} at {holder.client_addr or 'a local socket'}, "
        f"backend {holder.pid} of the database{since}. Start one trainer for a run: stop that one first, or, if it is "
        f"gone and the database has not seen it, SELECT pg_terminate_backend({holder.pid})"
    )
