"""A process's start on RabbitMQ: its queues are there and of the right kind, and a message may be held long enough."""

from __future__ import annotations

import logging
import time

from celery import Celery
from kombu.connection import Connection
from kombu.exceptions import OperationalError

from common.broker import (
    CONNECT_TIMEOUT_S,
    CONSUMER_TIMEOUT_S,
    QUEUE_CONSUMER_TIMEOUT_SINCE,
    Declared,
    Version,
    consumer_timeout_s,
    declare_queues,
    is_rabbitmq,
    node_queues,
    stage_queues,
)
from common.budgets import longest_held_s
from common.db import runs
from common.db.session import Database
from common.episode import Stage
from common.errors import SetupError, StillAway
from common.settings import Settings, masked

logger = logging.getLogger(__name__)

WAIT_S = 120.0
"""How long a process waits at its start for a broker that is away."""
RETRY_S = 1.0


def prepare_broker(app: Celery, given: Settings, *, own: Stage | None = None, wait_s: float = WAIT_S) -> Version | None:
    """Declare the queues and give them to the app; the server's version, None = the broker is no RabbitMQ.

    Waits for: a broker that is away. Raises StillAway when it stays away, SetupError when a queue is missing or of
    another kind.
    """
    broker_url = given.require_broker_url()
    if not is_rabbitmq(broker_url):
        return None
    declared = _declare(broker_url, given, own=own, wait_s=wait_s)
    queues = [*stage_queues(given, declared.version), *node_queues(given, declared.version)]
    for queue in queues:
        # Else Celery would declare them, the exchanges too, whenever it connects.
        queue.no_declare = not declared.may_declare
    app.conf.task_queues = queues
    return declared.version


def _declare(broker_url: str, given: Settings, *, own: Stage | None, wait_s: float) -> Declared:
    deadline = time.monotonic() + wait_s
    while True:
        with Connection(broker_url, connect_timeout=CONNECT_TIMEOUT_S) as connection:
            try:
                connection.ensure_connection(max_retries=1, timeout=CONNECT_TIMEOUT_S)
                return declare_queues(connection, given, own=own)
            except (*connection.connection_errors, *connection.channel_errors, OperationalError) as error:
                trouble = f"cannot use the broker {masked(broker_url)}: {error}: see ROLLMILL_BROKER_URL"
        if time.monotonic() >= deadline:
            raise StillAway(trouble)
        logger.warning("%s; trying for %.0f s more", trouble, deadline - time.monotonic())
        time.sleep(RETRY_S)


def check_held(stage: Stage, database: Database, given: Settings, version: Version) -> None:
    """Compare the longest time that a message of the stage may be held with what the server allows.

    Beyond it the server closes the channel, and with it the worker ends. Raises SetupError when it is known to be too
    short; warns when it is not known.
    """
    with database.begin() as conn:
        held_s = longest_held_s(stage, (run.config for run in runs.active(conn) if run.is_readable), given)
    allowed_s = consumer_timeout_s(given, version)
    if allowed_s is None:
        logger.warning(
            "consumer_timeout of the broker is not known, stage=%s holds a message for up to %.0f s: %s",
            stage,
            held_s,
            _longer(CONSUMER_TIMEOUT_S, version),
        )
    elif allowed_s < held_s:
        raise SetupError(
            f"the broker takes a message back after {allowed_s:g} s, but {stage} may hold one for {held_s:g} s: "
            f"{_longer(max(CONSUMER_TIMEOUT_S, 2 * held_s), version)}"
        )


def _longer(wanted_s: float, version: Version) -> str:
    """How to let a message be held for longer."""
    state = f"set ROLLMILL_BROKER_CONSUMER_TIMEOUT_S={wanted_s:.0f}"
    if version >= QUEUE_CONSUMER_TIMEOUT_SINCE:
        return f"{state} and run `rollmill broker queues --recreate`"
    return f"put `consumer_timeout = {wanted_s * 1000:.0f}` into rabbitmq.conf, and {state}"
