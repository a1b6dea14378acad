"""Groups that take longer than the staleness bound has patience: wait for them, or give them up in time.

`is_any_late` holds up the next step (train.late_groups = "wait"); `cancel_doomed` ends what no step can take any more.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from common.db.cancel import Cancelled, cancel_groups

WHY = "its group is older than max_staleness"
"""What the history says of an episode whose group nobody can train any more."""


def is_any_late(conn: Connection, run_id: int, *, oldest: int) -> bool:
    """Whether an open group has tokens of version `oldest` or before, or may have, made when no newer one was there."""
    late: bool = conn.execute(
        text(
            """
            SELECT EXISTS (
                SELECT FROM episode_group g WHERE g.run_id = :run_id AND g.state = 'OPEN' AND g.eval_version IS NULL
                   AND (NOT EXISTS (SELECT FROM policy_version v WHERE v.run_id = g.run_id
                                       AND v.number > :oldest AND v.published_at <= g.created_at)
                        -- Engines serve a version only a moment after it was published.
                        OR EXISTS (SELECT FROM episode e WHERE e.group_id = g.id AND e.version_min <= :oldest)))
            """
        ),
        {"run_id": run_id, "oldest": oldest},
    ).scalar_one()
    return late


def cancel_doomed(conn: Connection) -> Cancelled | None:
    """Cancel the rest of each open group of which an episode is scored that is too old for the next step; None = none.

    The group completes with that and is dropped as stale, as it would have been; but its room, and the engine's, is
    free for a new one now. An episode that is not scored yet dooms no group: it may fail, and then does not count.
    """
    doomed = conn.execute(
        text(
            """
            SELECT g.id FROM episode_group g JOIN run r ON r.id = g.run_id AND r.state IN ('ACTIVE', 'PAUSED')
             WHERE g.state = 'OPEN'
               AND EXISTS (SELECT FROM episode e WHERE e.group_id = g.id AND e.state = 'SCORED' AND e.version_min
                           < (SELECT max(v.number) FROM policy_version v WHERE v.run_id = g.run_id)
                             - CAST(r.config #>> '{train,max_staleness}' AS int))
             ORDER BY g.id
            """
        )
    ).scalars()
    ids = list(doomed)
    return cancel_groups(conn, ids, why=WHY) if ids else None
