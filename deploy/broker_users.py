"""`rollmill broker users`: a RabbitMQ user for each kind of process, with the patterns that it needs and no more.

They come as a file of definitions, which one rabbitmqctl command imports, here or on the node's own machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from rich.table import Table
from rich.text import Text

from common.db.roles import PREFIX_PATTERN
from common.episode import Stage
from common.errors import SetupError
from common.queues import DEAD_EXCHANGE, EXCHANGE_OF, WEIGHTS_EXCHANGE, queue_of
from common.settings import Settings, masked
from deploy.folder import write_private
from deploy.rabbitmqctl import find_node
from deploy.roles import keep_passwords

SALT_BYTES = 4
"""RabbitMQ's own form of a stored password."""


class BrokerUser(StrEnum):
    """Who connects to the broker. The user is called `<prefix>_<value>`."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    FEEDER = "feeder"
    """Announces new episodes to INIT; hears nothing."""
    REAPER = "reaper"
    """Announces episodes to all stages; hears nothing."""
    TRAINER = "trainer"
    """Announces new policy versions; hears nothing."""
    FLOWER = "flower"
    """Watches the workers and may ask them to stop; announces no episodes."""


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """Names of queues and exchanges, as regular expressions without their ends."""

    configure: Sequence[str] = ()
    """What it may make and delete."""
    write: Sequence[str] = ()
    """Exchanges that it may send to, and queues that it may bind."""
    read: Sequence[str] = ()
    """Queues that it may take from, and exchanges that it may bind to."""
    tag: str = ""
    """For the management API: `management` sees what the patterns allow."""


_CONTROL, _REPLIES, _EVENTS = r"celery\.pidbox", r"reply\.celery\.pidbox", "celeryev"
"""Celery's own exchanges: commands to workers, their answers, their events."""


def _fleet(stage: Stage, *, hands_to: Sequence[Stage], more: Patterns | None = None) -> Patterns:
    """A fleet takes from its own stage's queues alone. It declares them, which is how it sees that they are of the
    right kind, and to declare a queue with dead letters wants the right to write these."""
    more = more or Patterns()
    own_control = rf"{stage}-[0-9]+@.+\.celery\.pidbox"
    return Patterns(
        configure=(stage, _EVENTS, _CONTROL, _REPLIES, own_control, *more.configure),
        write=(
            *(_exact(EXCHANGE_OF[to]) for to in hands_to),
            *(_exact(DEAD_EXCHANGE), _EVENTS, _REPLIES, own_control),
            *more.write,
        ),
        read=(stage, _CONTROL, own_control, *more.read),
    )


def _exact(name: str) -> str:
    return name.replace(".", r"\.")


_WEIGHTS = _exact(WEIGHTS_EXCHANGE)
_WEIGHTS_QUEUE = rf"{_WEIGHTS}\..+"
_NODE_QUEUES = queue_of(Stage.RUN, ".+")
_EVENTS_QUEUE = r"celeryev\..+"
_REPLIES_QUEUE = r".+\.reply\.celery\.pidbox"

PATTERNS: Mapping[BrokerUser, Patterns] = MappingProxyType(
    {
        # Each stage may also send to itself, after a failure, and RUN back to INIT, for a new attempt.
        BrokerUser.INIT: _fleet(Stage.INIT, hands_to=(Stage.INIT, Stage.RUN)),
        BrokerUser.RUN: _fleet(
            Stage.RUN,
            hands_to=(Stage.INIT, Stage.RUN, Stage.EVAL),
            more=Patterns(
                configure=(_WEIGHTS, _WEIGHTS_QUEUE, _NODE_QUEUES),
                write=(_WEIGHTS_QUEUE, _NODE_QUEUES),
                # To bind a node's queue wants the right to read its exchange.
                read=(_WEIGHTS, _WEIGHTS_QUEUE, _NODE_QUEUES, _exact(EXCHANGE_OF[Stage.RUN])),
            ),
        ),
        BrokerUser.EVAL: _fleet(Stage.EVAL, hands_to=(Stage.EVAL,)),
        BrokerUser.FEEDER: Patterns(write=(_exact(EXCHANGE_OF[Stage.INIT]),)),
        BrokerUser.REAPER: Patterns(write=tuple(_exact(exchange) for exchange in EXCHANGE_OF.values())),
        BrokerUser.TRAINER: Patterns(configure=(_WEIGHTS,), write=(_WEIGHTS,)),
        BrokerUser.FLOWER: Patterns(
            configure=(_EVENTS, _EVENTS_QUEUE, _CONTROL, _REPLIES, _REPLIES_QUEUE),
            write=(_EVENTS_QUEUE, _CONTROL, _REPLIES_QUEUE),
            read=(_EVENTS, _EVENTS_QUEUE, _REPLIES, _REPLIES_QUEUE),
            tag="management",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class MadeUsers:
    """Where everything lies."""

    passwords_file: Path
    definitions_file: Path
    """To be imported by the node; it holds no readable password."""
    applied: bool


def make_users(given: Settings, *, prefix: str, passwords_file: Path, apply: bool) -> MadeUsers:
    """Write the users' passwords and definitions, and with `apply` give them to the node.

    Raises SetupError for a wrong prefix or file, or where the node cannot be reached from this machine.
    """
    if not PREFIX_PATTERN.fullmatch(prefix):
        raise SetupError(f"prefix {prefix!r} of the users must be lower-case letters, digits and _: rollmill, say")
    broker_url = given.require_broker_url()
    passwords = keep_passwords([f"{prefix}_{user}" for user in BrokerUser], passwords_file)
    document = definitions(passwords, prefix=prefix, vhost=vhost_of(broker_url))
    file = passwords_file.with_name(f"{passwords_file.name}.json")
    write_private(file, document)
    if apply:
        node = find_node(broker_url, given.data_dir)
        if node is None:
            raise SetupError(
                f"rabbitmqctl does not reach the node of {masked(broker_url)} from here: run "
                f"`rabbitmqctl import_definitions < {file}` on the node's machine"
            )
        node.import_definitions(document)
    return MadeUsers(passwords_file=passwords_file, definitions_file=file, applied=apply)


def definitions(passwords: Mapping[str, str], *, prefix: str, vhost: str) -> str:
    """The users and their permissions in the form that `rabbitmqctl import_definitions` reads."""
    users, permissions = [], []
    for user, patterns in PATTERNS.items():
        name = f"{prefix}_{user}"
        users.append(
            {
                "name": name,
                "password_hash": _hash(passwords[name]),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": patterns.tag,
            }
        )
        permissions.append(
            {
                "user": name,
                "vhost": vhost,
                "configure": _pattern(patterns.configure),
                "write": _pattern(patterns.write),
                "read": _pattern(patterns.read),
            }
        )
    return json.dumps({"users": users, "permissions": permissions}, indent=2) + "\n"


def vhost_of(broker_url: str) -> str:
    """The virtual host of an AMQP URL: what follows the first slash, `/` where nothing does."""
    return unquote(urlsplit(broker_url).path[1:]) or "/"


def _hash(password: str) -> str:
    salt = secrets.token_bytes(SALT_BYTES)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def _pattern(parts: Sequence[str]) -> str:
    """A pattern that matches these names and nothing else; `^$` matches no name."""
    return f"^({'|'.join(parts)})$" if parts else "^$"


def users_table(*, prefix: str) -> Table:
    """Who may do what."""
    table = Table(box=None, header_style="dim")
    for column in ("user", "configure", "write", "read"):
        table.add_column(column, overflow="fold")
    for user, patterns in PATTERNS.items():
        cells = (_pattern(part) for part in (patterns.configure, patterns.write, patterns.read))
        table.add_row(f"{prefix}_{user}", *(Text(cell) for cell in cells))
    return table
