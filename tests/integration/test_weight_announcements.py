"""The listener against real brokers: what the trainer announces is heard, also after the broker was away."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kombu.connection import Connection
from kombu.entity import Exchange

from common.queues import WEIGHTS_EXCHANGE
from workers.weight_announcements import AnnouncementListener

WITHIN_S = 20.0


@pytest.fixture(params=["amqp", "redis"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def amqp_url(rabbitmq_url: str) -> str:
    return rabbitmq_url


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    return valkey_url


@pytest.fixture
def heard() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def listener(broker_url: str, heard: threading.Semaphore) -> Iterator[AnnouncementListener]:
    listener = AnnouncementListener(broker_url, heard.release)
    listener.start()
    assert listener.listening.wait(WITHIN_S)
    yield listener
    listener.stop()
    assert not listener.alive


def announce(url: str) -> None:
    exchange = Exchange(WEIGHTS_EXCHANGE, type="fanout")
    with Connection(url) as connection:
        producer = connection.Producer(serializer="json")
        producer.publish({"run": 5, "version": 7}, exchange=exchange, declare=[exchange])


def test_each_announcement_is_heard(
    listener: AnnouncementListener, heard: threading.Semaphore, broker_url: str
) -> None:
    for _ in range(3):
        announce(broker_url)
        assert heard.acquire(timeout=WITHIN_S)


def test_all_listeners_hear_it(listener: AnnouncementListener, heard: threading.Semaphore, broker_url: str) -> None:
    other_heard = threading.Semaphore(0)
    other = AnnouncementListener(broker_url, other_heard.release)
    other.start()
    assert other.listening.wait(WITHIN_S)
    announce(broker_url)
    assert heard.acquire(timeout=WITHIN_S)
    assert other_heard.acquire(timeout=WITHIN_S)
    other.stop()
