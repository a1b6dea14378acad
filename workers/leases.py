"""The claims that this process holds: one thread renews all their leases in one statement."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from common.db import episodes
from common.db.session import Database
from common.errors import DatabaseUnavailable

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""A database that hangs must not keep a process from ending."""


class Leases:
    """Waits for: the next heartbeat. Woken by: `close`. A claim whose lease was taken is told to stop."""

    def __init__(self, database: Database, *, lease_s: float, heartbeat_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._stop_work: dict[UUID, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self, token: UUID, stop_work: Callable[[], object]) -> Iterator[None]:
        """Keep a claim's lease alive for the length of the block; `stop_work` is called if it is lost."""
        with self._lock:
            self._stop_work[token] = stop_work
        try:
            yield
        finally:
            with self._lock:
                self._stop_work.pop(token, None)

    def stop_all(self) -> None:
        """Tell every claim's work to stop; the process is about to end."""
        with self._lock:
            callbacks = list(self._stop_work.values())
        for stop_work in callbacks:
            stop_work()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            with self._lock:
                tokens = list(self._stop_work)
            if tokens:
                self._renew(tokens)

    def _renew(self, tokens: list[UUID]) -> None:
        try:
            with self._database.begin() as conn:
                alive = episodes.renew(conn, tokens, lease_s=self._lease_s)
        except DatabaseUnavailable as error:
            logger.warning("leases not renewed claims=%d reason=%s", len(tokens), error)
            return
        for token in set(tokens) - alive:
            with self._lock:
                stop_work = self._stop_work.pop(token, None)
            if stop_work:
                logger.warning("lease lost token=%s", token)
                stop_work()
