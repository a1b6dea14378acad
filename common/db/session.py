"""Connections to Postgres, and the check that program and schema fit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import as_file, files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DisconnectionError, InterfaceError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from common.errors import DatabaseUnavailable, SetupError, StillAway
from common.settings import masked

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
RETRY_S = 1.0
WORKER_WAIT_S = 120.0
"""How long a process of the loop waits at its start for a database that is away: nobody has anything else to do."""
PING_AFTER_S = 1.0
"""A connection that nobody used for so long is tried before it is handed out: the server may have gone meanwhile."""
MIGRATION_LOCK = 7_261_004
INSUFFICIENT_PRIVILEGE = "42501"
"""SQLSTATE of what the user's role may not do."""


class Database:
    """A pool of connections. Transactions are short: never hold one across a request or a sandbox call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def connect(cls, url: str, *, pool_size: int = 8, wait_s: float = 0.0) -> Database:
        """Make the pool and try it, for `wait_s` while the server is away.

        Raises SetupError that says what is wrong with the URL, StillAway what is with the server.
        """
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            parsed = None
        if parsed is None or parsed.drivername not in ("postgresql", "postgres"):
            raise SetupError(
                f"database URL {masked(url)!r} is not of the form postgresql://user:password@host:port/name. "
                "Check ROLLMILL_DATABASE_URL"
            )
        engine = create_engine(
            parsed.set(drivername="postgresql+psycopg2"),
            # Beyond the pool's size callers wait: a connection that is made for one transaction costs more than that.
            pool_size=pool_size,
            max_overflow=0,
            pool_use_lifo=True,
            connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "rollmill"},
        )
        _ping_idle(engine)
        database = cls(engine)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                with database.begin() as conn:
                    conn.execute(text("SELECT 1"))
                return database
            except DatabaseUnavailable as error:
                trouble = f"cannot use the database {masked(url)}: {error}. Check ROLLMILL_DATABASE_URL"
            if time.monotonic() >= deadline:
                engine.dispose()
                raise StillAway(trouble)
            logger.warning("%s; trying for %.0f s more", trouble, deadline - time.monotonic())
            time.sleep(RETRY_S)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back on any error.

        Raises DatabaseUnavailable when the server is gone, SetupError when the user's role may not do this, so that
        callers need not know the driver's errors.
        """
        with self.translating_errors(), self.engine.begin() as conn:
            yield conn

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """Each statement is a transaction of its own, as durable as others, and a third of the round trips.

        For work that is one statement. Raises what `begin` raises.
        """
        with self.translating_errors(), self.engine.connect() as conn:
            driver = conn.connection.dbapi_connection
            assert driver is not None
            driver.autocommit = True
            try:
                yield conn
            finally:
                if not driver.closed:
                    driver.autocommit = False

    def lasting(self) -> Connection:
        """A connection beside the pool, the caller's to close; each statement is a transaction of its own.

        For what is a connection's: use it within `translating_errors`. Raises what `begin` raises.
        """
        with self.translating_errors():
            conn = self.engine.connect()
            conn.detach()
            driver = conn.connection.dbapi_connection
            assert driver is not None
            driver.autocommit = True
            return conn

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Turn the driver's errors within the block into those that `begin` raises."""
        try:
            yield
        except PoolTimeout as error:
            raise DatabaseUnavailable(f"no connection was free: {error}") from error
        except (OperationalError, InterfaceError) as error:
            raise DatabaseUnavailable(str(error.orig).strip().splitlines()[0]) from error
        except ProgrammingError as error:
            if getattr(error.orig, "pgcode", None) != INSUFFICIENT_PRIVILEGE:
                raise
            raise SetupError(
                f"database user {self.engine.url.username}: {str(error.orig).strip().splitlines()[0]}. "
                "`rollmill db roles` grants each process what it needs; check the user in ROLLMILL_DATABASE_URL"
            ) from error

    def dispose(self) -> None:
        self.engine.dispose()


def _ping_idle(engine: Engine) -> None:
    """Replace connections that died while they were idle, as `pool_pre_ping` does, without its cost on busy ones."""

    def note(_: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        entry.info["used_at"] = time.monotonic()

    def ping(connection: DBAPIConnection, entry: ConnectionPoolEntry, _: object) -> None:
        if time.monotonic() - entry.info.get("used_at", math.inf) > PING_AFTER_S:
            try:
                engine.dialect.do_ping(connection)
            except (engine.dialect.loaded_dbapi.OperationalError, engine.dialect.loaded_dbapi.InterfaceError) as error:
                raise DisconnectionError from error

    event.listen(engine, "checkin", note)
    event.listen(engine, "checkout", ping)


@contextmanager
def _alembic_config() -> Iterator[Config]:
    with as_file(files("migrations")) as folder:
        config = Config()
        config.set_main_option("script_location", str(folder))
        yield config


@lru_cache(maxsize=1)
def head_revision() -> str:
    """The newest revision that this program knows."""
    with _alembic_config() as config:
        head = ScriptDirectory.from_config(config).get_current_head()
    assert head is not None
    return head


def current_revision(database: Database) -> str | None:
    """The revision of the database; None = empty."""
    with database.begin() as conn:
        return MigrationContext.configure(conn).get_current_revision()


def migrate(database: Database) -> None:
    """Bring the schema up to this program's revision; safe to run from several processes at once."""
    _refuse_newer(database)
    with database.begin() as conn, _alembic_config() as config:
        conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        config.attributes["connection"] = conn
        command.upgrade(config, "head")


def check_schema(database: Database) -> None:
    """Raise SetupError unless the schema is exactly this program's."""
    _refuse_newer(database)
    found = current_revision(database)
    if found != head_revision():
        raise SetupError(
            f"the database has schema {found or '(none)'}, this program needs {head_revision()}: run `rollmill migrate`"
        )


def _refuse_newer(database: Database) -> None:
    found = current_revision(database)
    with _alembic_config() as config:
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SetupError(
            f"the database has schema {found}, which is newer than this program ({head_revision()}): "
            "upgrade rollmill, or point ROLLMILL_DATABASE_URL at another database"
        )
