"""Sends wake-ups to the queues, after the commit that made them true. A lost one is the reaper's work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from celery import Celery
from kombu.exceptions import OperationalError

from common.broker import is_rabbitmq
from common.db.episodes import Wakeup
from common.episode import Stage
from common.queues import EXCHANGE_OF, TASK_OF

logger = logging.getLogger(__name__)

RETRY_POLICY = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}


def publisher(app: Celery) -> Callable[[Sequence[Wakeup]], None]:
    """A function that sends wake-ups, and only warns when the broker is away."""

    def publish(wakeups: Sequence[Wakeup]) -> None:
        rabbitmq = is_rabbitmq(app.conf.broker_url)
        try:
            for wakeup in wakeups:
                app.send_task(
                    TASK_OF[wakeup.stage],
                    args=[wakeup.episode_id, wakeup.attempt],
                    queue=wakeup.stage.value,
                    **_by_exchange(wakeup.stage, rabbitmq=rabbitmq),
                    retry_policy=RETRY_POLICY,
                )
        except (OperationalError, OSError) as error:
            logger.warning("broker away, %d messages left to the reaper: %s", len(wakeups), error)

    return publish


def _by_exchange(stage: Stage, *, rabbitmq: bool) -> dict[str, str]:
    """Celery would send past the stage's exchange, by the default one: a user that may do that may send anywhere."""
    return {"exchange": EXCHANGE_OF[stage], "routing_key": stage.value} if rabbitmq else {}
