"""The Celery application: three queues, JSON ids only. `workers.fleet` serves a stage of it; Flower watches it.

A process has as many messages in hand as it works on episodes at once, and no more: with a prefetch multiplier of 1 the
prefetch is the pool's concurrency (`CONCURRENCY`), and late acknowledgement counts the episodes at work. So no message
waits in one process while another has room, and what a killed process held goes to the others at once.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from common.broker import is_rabbitmq, node_queues, stage_queues
from common.episode import Stage
from common.queues import EXCHANGE_OF, NODE_STAGES, queue_of
from common.settings import Settings, settings

A_DAY_S = 86_400


def celery_config(given: Settings) -> dict[str, Any]:
    """Celery's settings. Messages are durable, acknowledged late, and carry no payload."""
    broker_url = given.require_broker_url()
    return {
        "broker_url": broker_url,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_connection_timeout": 5,
        "broker_heartbeat": 30,
        # Redis hands an unacknowledged message out again after this; the reaper is faster and knows more.
        "broker_transport_options": {"visibility_timeout": A_DAY_S} if broker_url.startswith("redis") else {},
        "task_queues": (
            [*stage_queues(given, version=()), *node_queues(given, version=())]
            if is_rabbitmq(broker_url)
            else _plain_queues(given)
        ),
        "task_default_queue": Stage.INIT.value,
        "task_default_exchange": EXCHANGE_OF[Stage.INIT],
        "task_default_routing_key": Stage.INIT.value,
        "task_create_missing_queues": False,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_consumer": "workers.consumer:StageConsumer",
        # Flower turns them on, when somebody watches: three more messages a task.
        "worker_send_task_events": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_hijack_root_logger": False,
        "timezone": "UTC",
    }


def _plain_queues(given: Settings) -> list[Queue]:
    names = [(stage, queue_of(stage)) for stage in Stage]
    names += [(stage, queue_of(stage, given.node)) for stage in NODE_STAGES]
    return [Queue(name, Exchange(EXCHANGE_OF[stage], type="direct"), routing_key=name) for stage, name in names]


app = Celery("rollmill")


def _configure(sender: Celery, **_: object) -> None:
    sender.config_from_object(celery_config(settings()))


app.on_configure.connect(_configure)
