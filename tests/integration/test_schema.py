from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
from alembic import command
from sqlalchemy import text

from common.db.session import Database, _alembic_config, check_schema, migrate
from common.errors import DatabaseUnavailable, SetupError


def test_models_and_migrations_agree(database: Database):
    with database.begin() as conn, _alembic_config() as config:
        config.attributes["connection"] = conn
        command.check(config)


def test_migrating_twice_changes_nothing(database: Database):
    migrate(database)
    check_schema(database)


def test_a_newer_schema_is_refused_and_named(database: Database):
    with database.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for use in (migrate, check_schema):
        with pytest.raises(SetupError, match="schema 9999, which is newer than this program"):
            use(database)


def test_an_empty_database_says_how_to_migrate(database: Database):
    with database.begin() as conn:
        conn.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(SetupError, match="run `rollmill migrate`"):
        check_schema(database)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda url: url + "_missing", "does not exist"),
        (lambda url: "postgresql://a:b@127.0.0.1:1/none", "refused"),
        (lambda url: "postgresql://u:p@127.0.0.1:abc/x", "is not of the form postgresql://"),
        (lambda url: "not a url", "is not of the form postgresql://"),
        (lambda url: url.replace("postgresql", "mysql"), "is not of the form postgresql://"),
    ],
)
def test_a_wrong_url_is_one_clear_line(database_url: str, change: Callable[[str], str], expected: str):
    with pytest.raises(SetupError, match=expected) as caught:
        Database.connect(change(database_url))
    assert "\n" not in str(caught.value)


def test_a_lost_server_is_told_apart_from_a_wrong_statement(database: Database):
    with pytest.raises(DatabaseUnavailable), database.begin() as conn:
        conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    with database.begin() as conn:
        assert conn.execute(text("SELECT 1")).scalar_one() == 1


def test_stored_bytes_come_back_as_the_same_arrays(database: Database):
    ids = [0, 1, 255, 256, 151_643, 2**31 - 1]
    logprobs = [0.0, -0.5, -1.5e-6, -17.25, -1e-40, -math.inf]
    with database.begin() as conn:
        row = conn.execute(
            text("SELECT token_ids(:ids) AS ids, logprobs(:logprobs) AS logprobs, token_ids('') AS none"),
            {"ids": struct.pack("<6i", *ids), "logprobs": struct.pack("<6f", *logprobs)},
        ).one()
    assert row.ids == ids
    assert struct.pack("<6f", *row.logprobs) == struct.pack("<6f", *logprobs)
    assert row.none == []
