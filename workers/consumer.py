"""The part of a Celery worker that reads its queue; `workers.app` names it in the settings."""

from __future__ import annotations

from typing import ClassVar

from celery.worker.consumer import Consumer


class StageConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Celery's own without delayed delivery, which beside quorum queues makes 28 more that nobody uses."""

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        """The steps of its start."""

        default_steps: ClassVar[list[str]] = [
            step for step in Consumer.Blueprint.default_steps if "delayed_delivery" not in step
        ]
