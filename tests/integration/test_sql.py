"""`rollmill sql`: whatever is asked, by whoever may do everything, nothing of it stays in the database."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psycopg2
import pytest
from sqlalchemy import text

from common.config import RunConfig
from common.db import runs
from common.db.examples import Answer, ask
from common.db.session import Database
from common.errors import SetupError

NO_QUERY = "give one statement that only reads"
READ_ONLY = "in a read-only transaction"


@pytest.fixture
def stored(database: Database) -> Database:
    with database.begin() as conn:
        runs.open_run(conn, RunConfig(name="kept", model=Path("model")))
    return database


def asked(database: Database, sql: str) -> Answer:
    with database.begin() as conn:
        return ask(conn, sql)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("COMMIT; DELETE FROM run", NO_QUERY),
        ("COMMIT; DELETE FROM run RETURNING id", NO_QUERY),
        ("ROLLBACK; DELETE FROM run", NO_QUERY),
        ("SELECT 1; COMMIT; BEGIN; DELETE FROM run; COMMIT", NO_QUERY),
        ("END; DELETE FROM run", NO_QUERY),
        ("SET TRANSACTION READ WRITE; DELETE FROM run", NO_QUERY),
        ("SET default_transaction_read_only = off", NO_QUERY),
        ("DELETE FROM run", NO_QUERY),
        ("DELETE FROM run RETURNING id", READ_ONLY),
        ("WITH gone AS (DELETE FROM run RETURNING id) TABLE gone", READ_ONLY),
        ("EXPLAIN ANALYZE DELETE FROM run", READ_ONLY),
        ("SELECT * FROM run FOR UPDATE", READ_ONLY),
        ("SELECT set_config('transaction_read_only', 'off', false)", "cannot set transaction read-write mode"),
        ("DO 'BEGIN COMMIT; DELETE FROM run; END'", NO_QUERY),
        ("COPY run TO PROGRAM 'cat'", NO_QUERY),
        ("CREATE TABLE mine (id int)", NO_QUERY),
        ("SELECT 1 INTO mine", NO_QUERY),
        ("PREPARE mine AS DELETE FROM run; EXECUTE mine", NO_QUERY),
        ("$$ FOR EXECUTE 'COMMIT'; $$; DELETE FROM run", "syntax error"),
        ("'; COMMIT; DELETE FROM run; --", "unterminated quoted string"),
        ("", NO_QUERY),
        ("-- nothing", NO_QUERY),
    ],
)
def test_what_would_write_is_refused(stored: Database, sql: str, why: str):
    with pytest.raises(SetupError, match=f"^the database refused: .*{why}"):
        asked(stored, sql)
    assert asked(stored, "SELECT name FROM run").rows == (("kept",),)


def test_what_functions_write_all_the_same_is_rolled_back(stored: Database):
    with suppress(SetupError):  # from Postgres 16 on
        asked(stored, "SELECT lo_from_bytea(0, 'x')")
    assert asked(stored, "SELECT count(*) FROM pg_largeobject_metadata").rows == ((0,),)


def test_the_session_is_as_it_was_for_who_uses_it_next(stored: Database):
    with stored.begin() as conn:
        ask(conn, "SELECT set_config('statement_timeout', '1ms', false)")
    with stored.begin() as conn:
        conn.execute(text("UPDATE run SET error = 'none'"))
        assert conn.execute(text("SHOW statement_timeout")).scalar_one() == "0"


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT name FROM run;", (("kept",),)),
        ("SELECT 1 AS a, 2 AS a -- twice", ((1, 2),)),
        ("WITH one AS (SELECT 1) TABLE one", ((1,),)),
        ("VALUES (1), (NULL)", ((1,), (None,))),
        ("SHOW transaction_read_only", (("on",),)),
        ("SELECT '50%' LIKE '%', ':name', 'a'::text", ((True, ":name", "a"),)),
        ("SELECT 1 WHERE false", ()),
    ],
)
def test_what_reads_is_answered(stored: Database, sql: str, rows: tuple[tuple[object, ...], ...]):
    assert asked(stored, sql).rows == rows


def test_a_plan_is_an_answer(stored: Database):
    assert asked(stored, "EXPLAIN ANALYZE SELECT name FROM run").columns == ("QUERY PLAN",)


def test_a_mistake_is_told_with_its_place_in_the_statement(stored: Database):
    with pytest.raises(SetupError, match=r'^the database refused: column "nope" does not exist \(line 2, column 7\)'):
        asked(stored, "SELECT name,\n  1 + nope FROM run")
    with pytest.raises(SetupError, match=r"refused: function f\(\) does not exist \(line 1, column 8\)\. No function"):
        asked(stored, "SELECT f()")


def test_who_may_only_read_is_answered_too(stored: Database, database_url: str):
    connection = psycopg2.connect(database_url)
    connection.autocommit = True
    name = stored.engine.url.database
    role = f"reader_of_{name}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'let me in'; GRANT SELECT ON run TO {role}")
    url = stored.engine.url.set(username=role, password="let me in", drivername="postgresql")
    reader = Database.connect(url.render_as_string(False))
    try:
        assert asked(reader, "SELECT name FROM run").rows == (("kept",),)
        with pytest.raises(SetupError, match="permission denied for table episode"):
            asked(reader, "SELECT * FROM episode")
    finally:
        reader.dispose()
        with connection.cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
        connection.close()
