"""The pool of connections: what a busy process takes from it, and what it gets after the server cut its connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from common.db.session import PING_AFTER_S, Database
from common.errors import DatabaseUnavailable
from tests.integration.world import World

CUT = text(
    "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
"""End all other sessions, and wait until they are gone."""


@pytest.fixture
def used(database_url: str) -> Iterator[Database]:
    """A database with one connection, which it has just used."""
    database = Database.connect(database_url, pool_size=1)
    yield database
    database.dispose()


def ask(database: Database) -> int:
    with database.begin() as conn:
        return int(conn.execute(text("SELECT 1")).scalar_one())


def cut(database: Database) -> int:
    with database.begin() as conn:
        return int(conn.execute(CUT).scalar_one())


def test_a_connection_that_died_while_idle_is_replaced_unseen(used: Database, database: Database) -> None:
    assert cut(database) == 1
    # Nothing to wait for but the clock: the pool goes by the connection's age alone.
    time.sleep(PING_AFTER_S + 0.1)
    assert ask(used) == 1


def test_a_busy_connection_that_died_fails_once_and_is_not_handed_out_again(used: Database, database: Database) -> None:
    assert cut(database) == 1
    with pytest.raises(DatabaseUnavailable):
        ask(used)
    assert ask(used) == 1


def test_a_statement_is_committed_by_itself_and_leaves_transactions_as_they_were(
    used: Database, database: Database
) -> None:
    with used.autocommit() as conn:
        conn.execute(text("CREATE TABLE kept (n int)"))
        conn.execute(text("INSERT INTO kept VALUES (1)"))
        with database.begin() as other:
            assert other.execute(text("SELECT n FROM kept")).scalars().all() == [1]
    with used.engine.connect() as conn:
        conn.execute(text("INSERT INTO kept VALUES (2)"))
        conn.rollback()
    with database.begin() as other:
        assert other.execute(text("SELECT n FROM kept")).scalars().all() == [1]


def test_siblings_that_are_scored_at_once_are_all_counted(world: World) -> None:
    wakeups = [world.sample(world.prepare(wakeup)) for wakeup in world.feed(num_groups=6)]
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(world.score, wakeups))
    with world.database.begin() as conn:
        groups = conn.execute(text("SELECT state, num_final FROM episode_group")).all()
    assert groups == [("COMPLETE", 2)] * 6
