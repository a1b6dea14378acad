"""What Postgres does for the statements of a function: their plans and times, without a copy of their text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, event


@dataclass(frozen=True, kw_only=True)
class Scan:
    """One access to a table in a plan that was carried out."""

    kind: str
    table: str
    num_rows: int
    """Rows that it read, those that a filter removed included."""


@contextmanager
def scans_of(conn: Connection) -> Iterator[list[Scan]]:
    """Collects the scans of every statement that the block executes on this connection.

    Each statement is carried out once before, under EXPLAIN, and undone.
    """
    scans: list[Scan] = []

    def explain(conn: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        assert not many, f"a batch can't be explained: {statement}"
        if statement.startswith("PREPARE"):
            return
        with closing(conn.connection.cursor()) as cursor:
            cursor.execute("SAVEPOINT explaining")
            # The plan that a prepared statement ends up with, whatever its parameters.
            cursor.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            cursor.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters)
            ((plans,),) = cursor.fetchall()
            scans.extend(_scans(plans[0]["Plan"]))
            cursor.execute("ROLLBACK TO explaining")

    event.listen(conn, "before_cursor_execute", explain)
    try:
        yield scans
    finally:
        event.remove(conn, "before_cursor_execute", explain)


def _scans(node: dict[str, Any], table: str = "") -> Iterator[Scan]:
    kind: str = node["Node Type"]
    table = node.get("Relation Name", table)
    if kind.endswith("Scan") and table:
        read = sum(
            node.get(key, 0) for key in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        )
        yield Scan(kind=kind, table=table, num_rows=round(read * node["Actual Loops"]))
    for child in node.get("Plans", []):
        yield from _scans(child, table if kind == "Bitmap Heap Scan" else "")


@contextmanager
def times_of(conn: Connection) -> Iterator[list[float]]:
    """Collects the time in seconds that each statement of the block took."""
    times: list[float] = []
    started = 0.0

    def start(*_: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def stop(_conn: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("PREPARE"):
            times.append(time.perf_counter() - started)

    event.listen(conn, "before_cursor_execute", start)
    event.listen(conn, "after_cursor_execute", stop)
    try:
        yield times
    finally:
        event.remove(conn, "before_cursor_execute", start)
        event.remove(conn, "after_cursor_execute", stop)
