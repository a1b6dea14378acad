"""Groups: how many are in flight, making new ones, counting their episodes to the end."""

from __future__ import annotations

from sqlalchemy import Connection, text

from common.db.episodes import Wakeup
from common.episode import Stage


def num_in_flight(conn: Connection, run_id: int, *, live_version: int) -> int:
    """Groups that hold a slot under the staleness bound.

    A trained group keeps its slot until the version it made is live on the engines: a group that starts before
    that would be sampled by weights older than the bound counts on.
    """
    count: int = conn.execute(
        text(
            """
            SELECT (SELECT count(*) FROM episode_group
                     WHERE run_id = :run_id AND state IN ('OPEN', 'COMPLETE', 'TAKEN') AND eval_version IS NULL)
                 + (SELECT coalesce(sum(num_groups), 0) FROM train_step
                     WHERE run_id = :run_id AND version_in >= :live_version)
            """
        ),
        {"run_id": run_id, "live_version": live_version},
    ).scalar_one()
    return count


def num_not_dropped(conn: Connection, run_id: int) -> int:
    """Groups of the run that were trained or may still be: all of them count since version 0."""
    return num_in_flight(conn, run_id, live_version=0)


def create(
    conn: Connection,
    *,
    run_id: int,
    task_ids: list[int],
    size: int,
    wanted: int | None = None,
    eval_version: int | None = None,
) -> list[Wakeup]:
    """One group of `size` NEW episodes for each task, in order; returns the messages to send after the commit.

    With `wanted`, a group is complete when so many are scored, and the others are cancelled as stragglers. With
    `eval_version` they evaluate that version.
    """
    rows = conn.execute(
        text(
            """
            WITH made AS (
                INSERT INTO episode_group (run_id, task_id, size, wanted, eval_version)
                SELECT :run_id, task_id, :size, :wanted, CAST(:eval_version AS int)
                  FROM unnest(CAST(:task_ids AS bigint[])) WITH ORDINALITY AS t (task_id, n)
                 ORDER BY n
                RETURNING id
            ), born AS (
                INSERT INTO episode (run_id, group_id, index, eval_version)
                SELECT :run_id, made.id, i, CAST(:eval_version AS int)
                  FROM made, generate_series(0, :size - 1) AS i ORDER BY made.id, i
                RETURNING id, attempt
            ), noted AS (
                INSERT INTO episode_event (episode_id, attempt, to_state, why) SELECT id, 1, 'NEW', 'fed' FROM born
            )
            SELECT id, attempt FROM born ORDER BY id
            """
        ),
        {"run_id": run_id, "task_ids": task_ids, "size": size, "wanted": wanted, "eval_version": eval_version},
    )
    return [Wakeup(stage=Stage.INIT, episode_id=row.id, attempt=row.attempt) for row in rows]
