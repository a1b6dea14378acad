from __future__ import annotations

import pytest

from common.broker import consumer_timeout_s, dead_queues, node_queues, stage_queues
from common.queues import QueueKind
from common.settings import Settings

URL = "amqp://me:secret@127.0.0.1//"
CLASSIC = Settings(broker_url=URL)
QUORUM = Settings(broker_url=URL, broker_queues=QueueKind.QUORUM)


def test_each_stage_has_its_own_exchange_and_dead_letter_queue() -> None:
    stages, dead = stage_queues(CLASSIC, (3, 10, 8)), dead_queues(CLASSIC)
    assert [(queue.name, queue.exchange.name, queue.routing_key) for queue in stages] == [
        ("init", "rollmill.init", "init"),
        ("run", "rollmill.run", "run"),
        ("eval", "rollmill.eval", "eval"),
    ]
    assert [queue.queue_arguments["x-dead-letter-routing-key"] for queue in stages] == [queue.name for queue in dead]
    assert {queue.exchange.name for queue in dead} == {"rollmill.dead"}


def test_only_quorum_queues_count_deliveries() -> None:
    assert {queue.queue_arguments.get("x-delivery-limit") for queue in stage_queues(CLASSIC, (3, 10, 8))} == {None}
    assert {queue.queue_arguments["x-delivery-limit"] for queue in stage_queues(QUORUM, (3, 10, 8))} == {3}
    assert {queue.queue_arguments["x-queue-type"] for queue in (*stage_queues(QUORUM, ()), *dead_queues(QUORUM))} == {
        "quorum"
    }


@pytest.mark.parametrize(
    ("version", "stated_s", "known_s", "argument_ms"),
    [
        ((3, 10, 8), None, None, None),
        ((3, 11, 28), 7200.0, 7200.0, None),
        ((3, 12, 0), None, 86400.0, 86_400_000),
        ((4, 1, 3), 7200.0, 7200.0, 7_200_000),
    ],
)
def test_from_version_3_12_on_the_consumer_timeout_is_an_argument_of_the_queues(
    version: tuple[int, ...], stated_s: float | None, known_s: float | None, argument_ms: int | None
) -> None:
    given = CLASSIC.model_copy(update={"broker_consumer_timeout_s": stated_s})
    assert consumer_timeout_s(given, version) == known_s
    assert {queue.queue_arguments.get("x-consumer-timeout") for queue in stage_queues(given, version)} == {argument_ms}


def test_a_nodes_queue_hangs_on_its_stages_exchange_and_goes_when_the_node_has_gone() -> None:
    (queue,) = node_queues(QUORUM.model_copy(update={"node": "a.b"}), (3, 12, 0))
    assert (queue.name, queue.exchange.name, queue.routing_key) == ("run@a.b", "rollmill.run", "run@a.b")
    of_stage = stage_queues(QUORUM, (3, 12, 0))[1].queue_arguments
    assert queue.queue_arguments == {**of_stage, "x-expires": 3_600_000}
