"""Hears from the broker that a run has a new policy version, and wakes this process's weight keeper."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError

from common.queues import WEIGHTS_EXCHANGE
from common.settings import masked

logger = logging.getLogger(__name__)

RECONNECT_MIN_S = 0.5
RECONNECT_MAX_S = 10.0
CONNECT_TIMEOUT_S = 5.0
HEARTBEAT_S = 20.0
DRAIN_S = 0.5


class AnnouncementListener:
    """A thread that hears announcements of new versions from the broker, and connects again when it was away."""

    def __init__(self, broker_url: str, on_announce: Callable[[], object]) -> None:
        """`on_announce` is called in the listener's thread, once for each announcement, whatever its content."""
        self._broker_url = broker_url
        self._on_announce = on_announce
        self._stopping = threading.Event()
        self.listening = threading.Event()
        """Set while announcements are heard."""
        self._thread = threading.Thread(target=self._run, name="announcements", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False after the end."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float = CONNECT_TIMEOUT_S + DRAIN_S) -> None:
        """End the thread; it looks up from its connection every DRAIN_S."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        delay_s = RECONNECT_MIN_S
        while not self._stopping.is_set():
            connection = Connection(self._broker_url, connect_timeout=CONNECT_TIMEOUT_S, heartbeat=HEARTBEAT_S)
            lost = (*connection.connection_errors, *connection.channel_errors, OperationalError, OSError)
            try:
                with connection:
                    self._listen(connection)
            except lost as error:
                delay_s = RECONNECT_MIN_S if self.listening.is_set() else min(2 * delay_s, RECONNECT_MAX_S)
                where = masked(self._broker_url)
                logger.warning("broker away, new versions are found by polling: broker=%s: %s", where, error)
            finally:
                self.listening.clear()
            self._stopping.wait(delay_s)

    def _listen(self, connection: Connection) -> None:
        """Waits for announcements; also wakes up every DRAIN_S, to send heartbeats and to see `stop`."""
        exchange = Exchange(WEIGHTS_EXCHANGE, type="fanout")
        queue = Queue(f"{WEIGHTS_EXCHANGE}.{uuid4()}", exchange, exclusive=True, auto_delete=True, durable=False)
        with connection.channel() as channel, connection.Consumer(queue, channel=channel, no_ack=True) as consumer:
            consumer.on_message = self._hear
            while not self._stopping.is_set():
                connection.heartbeat_check()
                with suppress(TimeoutError):
                    connection.drain_events(timeout=DRAIN_S)
                self.listening.set()  # Not before: Redis is told of the subscription by the first wait.

    def _hear(self, message: object) -> None:
        self._on_announce()
