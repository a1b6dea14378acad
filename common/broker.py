"""The queues as RabbitMQ is told of them. Every process declares them at its start; `rollmill broker` looks at them.

Elsewhere (valkey, redis) queues are plain lists, which need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed
from kombu.connection import Connection
from kombu.entity import Exchange, Queue

from common.episode import Stage
from common.errors import SetupError
from common.queues import DEAD_EXCHANGE, DEAD_QUEUE_OF, EXCHANGE_OF, NODE_STAGES, QueueKind, queue_of
from common.settings import Settings, masked

DECLARES_NODE_QUEUES = frozenset({Stage.INIT, *NODE_STAGES})
"""Whose fleets make their node's queues at their start: who takes from them, and INIT, who sends the first messages."""

Version = tuple[int, ...]
"""Of the RabbitMQ server: (3, 10, 8)."""

CONNECT_TIMEOUT_S = 5.0
DELIVERY_LIMIT = 3
"""How often a message of a quorum queue is handed out again after its worker died, before it is a dead letter."""
MAX_DEAD_LETTERS = 10_000
"""In each queue; the oldest go first."""
CONSUMER_TIMEOUT_S = 86_400.0
"""How long a worker may hold a message, where that can be set for a queue: longer than any episode."""
NODE_QUEUE_EXPIRES_S = 3600.0
"""How long a node's queue stays while no fleet takes from it: nodes come and go. Its messages are sent again."""
QUEUE_CONSUMER_TIMEOUT_SINCE: Version = (3, 12)
"""The first version that takes the time as an argument of a queue; before, only rabbitmq.conf has it."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a process has found on the broker."""

    version: Version
    may_declare: bool
    """False = the broker user has no more rights than its process needs; the queues were there."""


def is_rabbitmq(broker_url: str) -> bool:
    """Whether the broker speaks AMQP."""
    return broker_url.startswith(("amqp://", "amqps://"))


def rabbitmq_version(connection: Connection) -> Version:
    """The version that the connected server says it has."""
    version: str = connection.connection.server_properties["version"]
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split(".") if part.isdigit())


def consumer_timeout_s(given: Settings, version: Version) -> float | None:
    """How long a worker may hold a message before the server closes its channel; None = nobody has said."""
    if version >= QUEUE_CONSUMER_TIMEOUT_SINCE:
        return given.broker_consumer_timeout_s or CONSUMER_TIMEOUT_S
    return given.broker_consumer_timeout_s


def stage_queues(given: Settings, version: Version) -> list[Queue]:
    """The stages' queues with their exchanges."""
    return [
        Queue(
            stage.value,
            Exchange(EXCHANGE_OF[stage], type="direct", durable=True),
            routing_key=stage.value,
            durable=True,
            # Celery looks for a quorum queue here, and not on the server, to leave out a prefetch that it would refuse.
            queue_arguments=_arguments(given, version, dead_queue=DEAD_QUEUE_OF[stage]),
        )
        for stage in Stage
    ]


def node_queues(given: Settings, version: Version) -> list[Queue]:
    """This node's own queues, which share their stage's exchange and its queue of dead letters."""
    queues = [queue for queue in stage_queues(given, version) if Stage(queue.name) in NODE_STAGES]
    expires = {"x-expires": int(NODE_QUEUE_EXPIRES_S * 1000)}
    return [
        Queue(
            queue_of(Stage(queue.name), given.node),
            queue.exchange,
            routing_key=queue_of(Stage(queue.name), given.node),
            durable=True,
            queue_arguments={**queue.queue_arguments, **expires},
        )
        for queue in queues
    ]


def _arguments(given: Settings, version: Version, *, dead_queue: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "x-queue-type": given.broker_queues.value,
        "x-dead-letter-exchange": DEAD_EXCHANGE,
        "x-dead-letter-routing-key": dead_queue,
    }
    if given.broker_queues is QueueKind.QUORUM:
        arguments["x-delivery-limit"] = DELIVERY_LIMIT
    if version >= QUEUE_CONSUMER_TIMEOUT_SINCE:
        timeout_s = consumer_timeout_s(given, version)
        assert timeout_s is not None
        arguments["x-consumer-timeout"] = int(timeout_s * 1000)
    return arguments


def dead_queues(given: Settings) -> list[Queue]:
    """The queues of dead letters, one for each stage."""
    exchange = Exchange(DEAD_EXCHANGE, type="direct", durable=True)
    arguments = {"x-queue-type": given.broker_queues.value, "x-max-length": MAX_DEAD_LETTERS}
    return [
        Queue(name, exchange, routing_key=name, durable=True, queue_arguments=arguments)
        for name in DEAD_QUEUE_OF.values()
    ]


def declare_queues(connection: Connection, given: Settings, *, own: Stage | None = None) -> Declared:
    """Make the queues that are missing, and see that the others are as the settings want them.

    A user that may not declare must find them there; of these, only the process's `own` queue is compared. Its node's
    queues are made here alone, as nobody else knows of the node.
    Raises SetupError for a queue that is missing or of another kind, kombu's errors when the broker goes away.
    """
    version = rabbitmq_version(connection)
    queues = [*dead_queues(given), *stage_queues(given, version)]
    try:
        for queue in queues:
            with _explained(queue, connection, given), connection.channel() as channel:
                queue(channel).declare()
        may_declare = True
    except AccessRefused:
        for queue in queues:
            with _explained(queue, connection, given), connection.channel() as channel:
                queue(channel).queue_declare(passive=queue.name != own)
        may_declare = False
    if own in DECLARES_NODE_QUEUES:
        for queue in node_queues(given, version):
            try:
                _make_node_queue(queue, connection, given)
            except AccessRefused as error:
                # INIT's user need not have the right: what it sends before RUN has made the queue is sent again.
                if own in NODE_STAGES:
                    raise SetupError(
                        f"broker user {connection.userid} may not make queue {queue.name} of this node "
                        f"({error.reply_text}): run `rollmill broker users` again"
                    ) from None
    return Declared(version=version, may_declare=may_declare)


def _make_node_queue(queue: Queue, connection: Connection, given: Settings) -> None:
    """Make it, anew if it is of another kind and nobody takes from it: `broker queues --recreate` knows no nodes."""
    try:
        _bind(queue, connection)
    except PreconditionFailed:
        with connection.channel() as channel:
            if queue(channel).queue_declare(passive=True).consumer_count == 0:
                channel.queue_delete(queue.name)
        with _explained(queue, connection, given):
            _bind(queue, connection)


def _bind(queue: Queue, connection: Connection) -> None:
    with connection.channel() as channel:
        bound = queue(channel)
        bound.queue_declare()
        bound.queue_bind()


def consumers(connection: Connection, given: Settings) -> dict[str, int]:
    """Who takes from the queues: number of consumers by queue, where there are any."""
    found = {}
    for queue in _all_queues(connection, given):
        with suppress(NotFound), connection.channel() as channel:
            found[queue.name] = queue(channel).queue_declare(passive=True).consumer_count
    return {name: number for name, number in found.items() if number}


def _all_queues(connection: Connection, given: Settings) -> list[Queue]:
    version = rabbitmq_version(connection)
    return [*dead_queues(given), *stage_queues(given, version), *node_queues(given, version)]


def recreate_queues(connection: Connection, given: Settings) -> int:
    """Delete the queues, with all their messages, and make them anew; returns how many messages went.

    Consumers are cut off from what they take from, so there should be none. Of nodes' queues this node's alone goes;
    the others' fleets see to theirs when they start.
    """
    num_messages = 0
    for queue in _all_queues(connection, given):
        with connection.channel() as channel:
            num_messages += channel.queue_delete(queue.name) or 0
    declare_queues(connection, given)
    return num_messages


@contextmanager
def _explained(queue: Queue, connection: Connection, given: Settings) -> Iterator[None]:
    """Turns the server's refusal of a queue into the line that says what to do."""
    where = f"queue {queue.name} of broker {masked(given.require_broker_url())}"
    try:
        yield
    except PreconditionFailed as error:
        raise SetupError(
            f"{where} is not what ROLLMILL_BROKER_QUEUES={given.broker_queues} needs ({error.reply_text}): stop the "
            "fleets and run `rollmill broker queues --recreate`; nothing is lost, "
            "`python -m workers.reaper --resend-all` then announces every episode again"
        ) from None
    except NotFound:
        raise SetupError(
            f"{where} is missing, and user {connection.userid} may not make it: "
            "run `rollmill broker queues` as a user that may"
        ) from None
