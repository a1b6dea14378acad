"""Tasks: loading a data set once, and reading its ids in order."""

from __future__ import annotations

import json
from collections.abc import Iterable

from pydantic import JsonValue
from sqlalchemy import Connection, text


def load(conn: Connection, *, dataset: str, handler: str, payloads: Iterable[tuple[str, dict[str, JsonValue]]]) -> int:
    """Store the (key, payload) pairs of a data set that are not there yet; returns how many were new."""
    documents = [{"key": key, "payload": payload} for key, payload in payloads]
    insert = text(
        """
        INSERT INTO task (dataset, key, handler, payload)
        SELECT :dataset, key, :handler, payload
          FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS given (key text, payload jsonb)
        ON CONFLICT (dataset, key) DO NOTHING
        """
    )
    return conn.execute(insert, {"dataset": dataset, "handler": handler, "rows": json.dumps(documents)}).rowcount


def ids(conn: Connection, dataset: str) -> list[int]:
    """Ids of a data set's tasks in the order in which they were loaded."""
    rows = conn.execute(text("SELECT id FROM task WHERE dataset = :dataset ORDER BY id"), {"dataset": dataset})
    return [row.id for row in rows]
