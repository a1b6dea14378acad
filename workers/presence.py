"""A RUN process says in Postgres that its node has a RUN fleet; the reaper misses it there when the node is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from common.db import nodes
from common.db.session import Database
from common.errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""A database that hangs must not keep a process from ending."""


class Presence:
    """Waits for: the next heartbeat. Woken by: `close`. Says nothing while the process can take no episode."""

    def __init__(self, database: Database, node: str, *, every_s: float, is_able: Callable[[], bool]) -> None:
        self._database = database
        self._node = node
        self._every_s = every_s
        self._is_able = is_able
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            if self._is_able():
                self._beat()
            if self._closed.wait(self._every_s):
                return

    def _beat(self) -> None:
        try:
            with self._database.begin() as conn:
                nodes.beat(conn, self._node, every_s=self._every_s)
        except DatabaseUnavailable as error:
            logger.warning("not said that RUN lives node=%s reason=%s", self._node, error)
