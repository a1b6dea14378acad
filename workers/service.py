"""The frame of the processes that do something in rounds: the feeder and the reaper."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable

from common.db.session import WORKER_WAIT_S, Database, check_schema
from common.errors import DatabaseUnavailable, SetupError
from common.log import setup_logging
from common.settings import Settings, settings
from workers.app import app
from workers.broker import prepare_broker

logger = logging.getLogger(__name__)

Round = Callable[[], object]


def serve(name: str, make_round: Callable[[Database, Settings], Round], *, every_s: Callable[[Settings], float]) -> int:
    """Do rounds until SIGTERM; one that finds the database away is tried again. Returns the exit code."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        given = settings()
        setup_logging(given.log_level)
        database = Database.connect(given.require_database_url(), pool_size=2, wait_s=WORKER_WAIT_S)
        check_schema(database)
        prepare_broker(app, given)
        do_round = make_round(database, given)
        while not stopped.wait(every_s(given)):
            try:
                do_round()
            except DatabaseUnavailable as error:
                logger.warning("database away: %s", error)
    except SetupError as error:
        sys.stderr.write(f"rollmill {name}: {error}\n")
        return error.exit_code
    database.dispose()
    return 0
