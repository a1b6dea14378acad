"""Names on the broker. A message carries an episode's id and attempt, nothing else; losing one loses nothing."""

from __future__ import annotations

from enum import StrEnum

from common.episode import Stage


class QueueKind(StrEnum):
    """How RabbitMQ keeps the stages' queues."""

    CLASSIC = "classic"
    """On one node: the cheapest."""
    QUORUM = "quorum"
    """On a majority of a cluster's nodes: a node may be lost. It also counts how often a message was handed out."""


EXCHANGE_OF = {stage: f"rollmill.{stage}" for stage in Stage}
"""Direct; one for each stage, so that a broker user may be allowed to send to one stage and not to another."""
DEAD_EXCHANGE = "rollmill.dead"
DEAD_QUEUE_OF = {stage: f"{stage}.dead" for stage in Stage}
"""Where RabbitMQ puts messages that no worker got done: handed out too often (quorum), or not readable at all.

A dead letter is a trace for people, nothing is lost with it: Postgres knows the episode and the reaper sends it again,
until it is done or its attempts are used up and it is FAILED, with the last error in `episode.detail`.
"""
NODE_STAGES = (Stage.RUN,)
"""Stages that need what lies on the node where INIT was. EVAL needs nothing of it: all that it reads is in Postgres."""


def queue_of(stage: Stage, node: str | None = None) -> str:
    """The stage's queue, which all its fleets take from; with a node, the one that only its fleet takes from."""
    return stage.value if node is None else f"{stage}@{node}"


WEIGHTS_EXCHANGE = "rollmill.weights"
"""Fanout: announces that a run has a new policy version. Keepers poll too, so a lost announcement costs a second."""

TASK_OF = {stage: f"rollmill.{stage}" for stage in Stage}
"""Celery task name of each stage; explicit, so that messages outlive module names."""

CONCURRENCY = {Stage.INIT: 16, Stage.RUN: 256, Stage.EVAL: 8}
"""Episodes that one process works on at once. RUN's share one asyncio loop and mostly wait for tokens."""
