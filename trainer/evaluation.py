"""Waits, after the last step, until the run's last version is evaluated; then the loop marks the run finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from common.db import evaluations, runs
from common.db.runs import Run
from common.db.session import Database
from common.episode import RunState
from common.errors import DatabaseUnavailable
from trainer.failures import AWAY_POLL_S

logger = logging.getLogger(__name__)

POLL_S = 0.1
LOOK_UP_EVERY_S = 10.0


def wait_for_evaluations(database: Database, run: Run, *, stop: threading.Event, look_up: Callable[[], None]) -> bool:
    """Waits for: the end of the run's evaluations, its being stopped, or `stop`; False = the last one.

    Without end as long as the run goes on: the feeder gives an evaluation up that cannot end. `look_up` is called now
    and then: can engines load the version at all?
    """
    looked_up = time.monotonic()
    while not stop.is_set():
        try:
            with database.begin() as conn:
                now = runs.find(conn, run.name)
                if now is None or now.state in (RunState.FINISHED, RunState.STOPPED):
                    return True
                if not evaluations.is_pending(conn, run.id):
                    return True
            if time.monotonic() - looked_up > LOOK_UP_EVERY_S:
                looked_up = time.monotonic()
                look_up()
                logger.info("still waiting for the last evaluation run=%d", run.id)
            stop.wait(POLL_S)
        except DatabaseUnavailable as error:
            logger.warning("database away run=%d: %s", run.id, error)
            stop.wait(AWAY_POLL_S)
    return False
