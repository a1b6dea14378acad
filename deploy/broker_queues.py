"""What `rollmill broker queues`, `dead` and `check` do: the queues of a RabbitMQ broker made, counted and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed
from kombu.connection import Connection
from kombu.entity import Queue
from rich.table import Table

from common.broker import (
    CONNECT_TIMEOUT_S,
    CONSUMER_TIMEOUT_S,
    Version,
    consumer_timeout_s,
    consumers,
    dead_queues,
    declare_queues,
    node_queues,
    rabbitmq_version,
    recreate_queues,
    stage_queues,
)
from common.episode import Stage
from common.errors import SetupError
from common.queues import CONCURRENCY
from common.settings import Settings, masked
from deploy.broker import check_broker
from deploy.rabbitmqctl import NO_LIMIT, find_node


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """A queue as it was found."""

    name: str
    arguments: dict[str, object]
    """As the settings want them."""
    num_messages: int | None
    """Ready to be handed out; None = there is no such queue."""
    num_consumers: int | None
    trouble: str | None
    """Why it is not what the settings want; None = it is, or this user may not compare."""


@dataclass(frozen=True, kw_only=True)
class BrokerState:
    """What `rollmill broker check` found."""

    server: str
    queues: tuple[QueueState, ...]
    consumer_timeout: str
    troubles: tuple[str, ...]
    """[] = all is well."""


@contextmanager
def rabbitmq(given: Settings) -> Iterator[Connection]:
    """A connection inside the block. Raises SetupError where the broker is away."""
    broker_url = given.require_broker_url()
    check_broker(broker_url)
    with Connection(broker_url, connect_timeout=CONNECT_TIMEOUT_S) as connection:
        connection.connect()
        yield connection


def make_queues(given: Settings, *, recreate: bool, force: bool = False) -> int | None:
    """Make the queues that are missing, or all anew; how many messages were deleted, None = nothing was.

    Raises SetupError for a queue of another kind, a user that may not do this, and, unless forced, for queues that
    are to be deleted while somebody takes from them.
    """
    with rabbitmq(given) as connection:
        try:
            if recreate:
                if not force:
                    _refuse_used(consumers(connection, given))
                return recreate_queues(connection, given)
            may_declare = declare_queues(connection, given).may_declare
        except AccessRefused as error:
            raise SetupError(f"broker user {connection.userid}: {error.reply_text}") from None
        if not may_declare:
            raise SetupError(
                f"broker user {connection.userid} may not declare queues: they are there, and not compared"
            )
    return None


def _refuse_used(found: dict[str, int]) -> None:
    if found:
        who = ", ".join(f"{name} has {number} consumer{'s' if number > 1 else ''}" for name, number in found.items())
        raise SetupError(
            f"fleets take from these queues, and would hear of nothing more: {who}. "
            "Stop the fleets first, or --force it"
        )


def replace_queues(given: Settings) -> None:
    """Make the queues of a broker that nobody else uses, whatever kind they were of: the reaper announces all again."""
    try:
        make_queues(given, recreate=False)
    except SetupError:
        make_queues(given, recreate=True, force=True)


def dead_letters(given: Settings, *, purge: bool) -> dict[str, int]:
    """Number of dead letters by queue; with `purge` they are deleted. Raises SetupError where a queue is missing."""
    with rabbitmq(given) as connection:
        numbers = {}
        for queue in dead_queues(given):
            try:
                with connection.channel() as channel:
                    bound = queue(channel)
                    numbers[queue.name] = bound.queue_declare(passive=True).message_count
                    if purge:
                        bound.purge()
            except NotFound:
                raise SetupError(f"no queue {queue.name} on the broker: run `rollmill broker queues`") from None
            except AccessRefused as error:
                raise SetupError(f"broker user {connection.userid}: {error.reply_text}") from None
    return numbers


def check_queues(given: Settings) -> BrokerState:
    """Look at the broker and compare it with the settings. Raises SetupError where it cannot be used at all."""
    with rabbitmq(given) as connection:
        version = rabbitmq_version(connection)
        product = connection.connection.server_properties.get("product", "?")
        found = [_look(connection, queue) for queue in (*stage_queues(given, version), *dead_queues(given))]
        own = [_look(connection, queue) for queue in node_queues(given, version)]
        # Where no fleet has taken from them lately there are none, which is as well.
        queues = (*found, *(queue for queue in own if queue.num_messages is not None))
    timeout, trouble = _consumer_timeout(given, version)
    return BrokerState(
        server=f"{product} {'.'.join(map(str, version))} at {masked(given.require_broker_url())}",
        queues=queues,
        consumer_timeout=timeout,
        troubles=(
            *(f"queue {queue.name}: {queue.trouble}" for queue in queues if queue.trouble),
            *([trouble] if trouble else []),
        ),
    )


def _look(connection: Connection, queue: Queue) -> QueueState:
    messages = consumers = trouble = None
    try:
        with connection.channel() as channel:
            found = queue(channel).queue_declare(passive=True)
            messages, consumers = found.message_count, found.consumer_count
        with connection.channel() as channel:
            queue(channel).queue_declare()
    except NotFound:
        trouble = "is missing: run `rollmill broker queues`"
    except PreconditionFailed as error:
        trouble = f"{error.reply_text}: stop the fleets and run `rollmill broker queues --recreate`"
    except AccessRefused:
        pass
    return QueueState(
        name=queue.name,
        arguments=queue.queue_arguments,
        num_messages=messages,
        num_consumers=consumers,
        trouble=trouble,
    )


def _consumer_timeout(given: Settings, version: Version) -> tuple[str, str | None]:
    """What is known of it, and what is wrong with that."""
    node = find_node(given.require_broker_url(), given.data_dir)
    stated_s = consumer_timeout_s(given, version)
    if node is None:
        if stated_s is None:
            return (
                "unknown: state it in ROLLMILL_BROKER_CONSUMER_TIMEOUT_S; "
                f"`consumer_timeout = {CONSUMER_TIMEOUT_S * 1000:.0f}` in rabbitmq.conf is a day",
                None,
            )
        return f"{stated_s:g} s, as ROLLMILL_BROKER_CONSUMER_TIMEOUT_S or the queues' arguments say", None
    if node.consumer_timeout_s == NO_LIMIT:
        return "none, as the node says", None
    shown = f"{node.consumer_timeout_s:g} s, as the node says"
    if given.broker_consumer_timeout_s is not None and given.broker_consumer_timeout_s > node.consumer_timeout_s:
        return shown, (
            f"ROLLMILL_BROKER_CONSUMER_TIMEOUT_S={given.broker_consumer_timeout_s:g}, "
            f"but consumer_timeout of the node is {node.consumer_timeout_s:g} s"
        )
    return shown, None


def queues_table(state: BrokerState) -> Table:
    """The queues, a line each."""
    table = Table(box=None, header_style="dim")
    for column in ("queue", "type", "messages", "consumers", "prefetch", "arguments"):
        table.add_column(column, justify="right" if column in ("messages", "consumers", "prefetch") else "left")
    for queue in state.queues:
        more = {name: value for name, value in queue.arguments.items() if name != "x-queue-type"}
        table.add_row(
            queue.name,
            "wrong" if queue.trouble else str(queue.arguments["x-queue-type"]),
            "-" if queue.num_messages is None else str(queue.num_messages),
            "-" if queue.num_consumers is None else str(queue.num_consumers),
            "-" if queue.name.endswith(".dead") else str(CONCURRENCY[Stage(queue.name.partition("@")[0])]),
            " ".join(f"{name}={value}" for name, value in more.items()),
        )
    return table
