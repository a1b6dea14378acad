"""Tasks that somebody hands to a run while it goes on. The feeder plays them before the run's own task set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from sqlalchemy import Connection, text

from common.db import runs, tasks
from common.episode import RunState
from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """What handing tasks to a run did."""

    num_new: int
    num_known: int
    """Tasks that it had been given before, by the same key."""
    num_waiting: int
    """Tasks that wait now, these included."""
    run_state: RunState


def submit(conn: Connection, name: str, given: Sequence[tuple[str, dict[str, JsonValue]]]) -> Submitted:
    """Queue (key, payload) pairs for the run. The same key twice is one task, so a submission may be repeated.

    Raises SetupError if the run is over, or a key stands for another task already; nothing is then queued. The run's
    row is locked until the transaction ends: a stop comes before it, and is seen, or after it, and ends these too.
    """
    run = runs.require(conn, name, lock=True)
    if run.state not in (RunState.ACTIVE, RunState.PAUSED):
        raise SetupError(f"run {name} is {run.state.lower()}: it takes no tasks. Start a run of another name")
    dataset = f"submitted:{name}"
    keys = [key for key, _ in given]
    _refuse_other_tasks(conn, dataset, given)
    tasks.load(conn, dataset=dataset, handler=run.config.handler, payloads=given)
    queued = conn.execute(
        text(
            """
            INSERT INTO submission (task_id, run_id)
            SELECT id, :run_id FROM task WHERE dataset = :dataset AND key = ANY(:keys) ORDER BY id
            ON CONFLICT (task_id) DO NOTHING
            """
        ),
        {"run_id": run.id, "dataset": dataset, "keys": keys},
    ).rowcount
    return Submitted(
        num_new=queued, num_known=len(keys) - queued, num_waiting=num_waiting(conn, run.id), run_state=run.state
    )


def _refuse_other_tasks(conn: Connection, dataset: str, given: Sequence[tuple[str, dict[str, JsonValue]]]) -> None:
    other = conn.execute(
        text(
            """
            SELECT t.key FROM task t
              JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS given (key text, payload jsonb) ON given.key = t.key
             WHERE t.dataset = :dataset AND t.payload <> given.payload ORDER BY t.id LIMIT 1
            """
        ),
        {"dataset": dataset, "rows": json.dumps([{"key": key, "payload": payload} for key, payload in given])},
    ).first()
    if other is not None:
        raise SetupError(f"task {other.key!r} was submitted before with other contents: give the new one another id")


def num_waiting(conn: Connection, run_id: int) -> int:
    """Submitted tasks of the run that have no group yet."""
    num: int = conn.execute(
        text("SELECT count(*) FROM submission WHERE run_id = :run_id AND fed_at IS NULL"), {"run_id": run_id}
    ).scalar_one()
    return num


def take(conn: Connection, run_id: int, *, limit: int) -> list[int]:
    """Ids of the tasks that waited longest, at most `limit`, which now count as fed.

    In the transaction that makes their groups, with the run's row locked: none is fed twice or forgotten.
    """
    rows = conn.execute(
        text(
            """
            UPDATE submission SET fed_at = now()
             WHERE task_id IN (SELECT task_id FROM submission WHERE run_id = :run_id AND fed_at IS NULL
                                ORDER BY task_id LIMIT :limit)
            RETURNING task_id
            """
        ),
        {"run_id": run_id, "limit": limit},
    )
    return sorted(row.task_id for row in rows)
