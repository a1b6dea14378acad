"""Sends wake-ups to the queues, after the commit that made them true. A lost one is the reaper's work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from celery import Celery, uuid
from kombu import Producer, Queue
from kombu.exceptions import OperationalError

from common.broker import is_rabbitmq
from common.db.episodes import Wakeup
from common.queues import TASK_OF, queue_of

logger = logging.getLogger(__name__)

RETRY_POLICY = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}


def publisher(app: Celery) -> Callable[[Sequence[Wakeup]], None]:
    """A function that sends wake-ups, and only warns when the broker is away."""

    def publish(wakeups: Sequence[Wakeup]) -> None:
        if not wakeups:
            return
        try:
            with app.producer_pool.acquire(block=True) as producer:
                for wakeup in wakeups:
                    _send(app, producer, wakeup)
        except (OperationalError, OSError) as error:
            logger.warning("broker away, %d messages left to the reaper: %s", len(wakeups), error)

    return publish


def _send(app: Celery, producer: Producer, wakeup: Wakeup) -> None:
    """What `Celery.send_task` sends, at half its cost, and to the stage's exchange.

    Celery would send past that, by the default exchange: a user that may do so may send anywhere.
    """
    message = app.amqp.create_task_message(
        uuid(), TASK_OF[wakeup.stage], (wakeup.episode_id, wakeup.attempt), {}, create_sent_event=False
    )
    exchange, key = app.amqp.queues[wakeup.stage.value].exchange, queue_of(wakeup.stage, wakeup.node)
    producer.publish(
        message.body,
        exchange=exchange,
        routing_key=key,
        # Redis has no exchanges of its own, so there the binding must be told; on RabbitMQ it was at the start.
        # There, where a node's queue is missing, the message goes nowhere: no fleet lives on that node.
        declare=[] if is_rabbitmq(app.conf.broker_url) else [Queue(key, exchange, routing_key=key)],
        headers=message.headers,
        serializer="json",
        delivery_mode="persistent",
        retry=True,
        retry_policy=RETRY_POLICY,
        **message.properties,
    )
