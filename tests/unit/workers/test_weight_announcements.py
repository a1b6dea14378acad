from __future__ import annotations

import socket
import threading
import time

from kombu.connection import Connection
from kombu.entity import Exchange

from common.queues import WEIGHTS_EXCHANGE
from workers.weight_announcements import CONNECT_TIMEOUT_S, AnnouncementListener


def test_hears_the_fanout_exchange() -> None:
    heard = threading.Event()
    listener = AnnouncementListener("memory://announcements", heard.set)
    listener.start()
    assert listener.listening.wait(5)
    exchange = Exchange(WEIGHTS_EXCHANGE, type="fanout")
    with Connection("memory://announcements") as connection:
        connection.Producer().publish({"run": 5, "version": 7}, exchange=exchange, declare=[exchange])
        assert heard.wait(5)
    listener.stop()
    assert not listener.alive


def test_a_broker_that_is_away_neither_ends_nor_holds_the_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    listener = AnnouncementListener(f"redis://127.0.0.1:{port}/0", lambda: None)
    listener.start()
    assert not listener.listening.wait(0.3)
    assert listener.alive
    started = time.monotonic()
    listener.stop()
    assert not listener.alive
    # Redis's client has tries of its own, with waits that chance makes longer or shorter.
    assert time.monotonic() - started < CONNECT_TIMEOUT_S
