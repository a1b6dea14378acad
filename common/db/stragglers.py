"""Stragglers: when enough episodes of an over-sampled group are scored, the rest is cancelled and the group complete.

Both halves are called by the move to SCORED, in its transaction: `hold_siblings` before it, `cancel_rest` after it.
Lock order as everywhere: episodes by id, then the group. So two that score at once come one after the other, and each
counts the other.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from common.episode import FINAL_STATES
from common.outcomes import AGENT_OUTCOMES

WHY = "straggler"
"""What the history says of an episode that was not waited for."""

CANCEL_HELD = """
    gone AS (
        UPDATE episode e
           SET state = 'CANCELLED', detail = :why, finished_at = clock_timestamp(),
               claim_worker = NULL, claim_token = NULL, lease_until = NULL, not_before = NULL
          FROM held WHERE e.id = held.id
        RETURNING e.id, e.attempt, e.group_id, held.state AS was, held.claim_worker
    ), noted AS (
        INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
        SELECT id, attempt, was, 'CANCELLED', claim_worker, :why FROM gone
    )"""
"""Takes the rows of `held` (id, state, claim_worker), which are locked, to CANCELLED: every cancellation's own part."""


def hold_siblings(conn: Connection, group_id: int) -> None:
    """Lock the episodes of the group that are not final, in order, so that `cancel_rest` waits for nobody."""
    conn.execute(
        text(
            "SELECT id FROM episode WHERE group_id = :group_id AND state <> ALL(:final) ORDER BY id FOR NO KEY UPDATE"
        ),
        {"group_id": group_id, "final": sorted(FINAL_STATES)},
    )


def cancel_rest(conn: Connection, group_id: int) -> int:
    """Cancel what is not final if the group has as many agent-outcome scores as it wants; returns how many that was."""
    num_cancelled: int = conn.execute(
        text(
            f"""
            WITH held AS (
                SELECT id, state, claim_worker FROM episode
                 WHERE group_id = :group_id AND state <> ALL(:final)
                   AND (SELECT count(*) FROM episode
                         WHERE group_id = :group_id AND state = 'SCORED' AND outcome = ANY(:agent))
                       >= (SELECT wanted FROM episode_group WHERE id = :group_id)
            ), {CANCEL_HELD}, completed AS (
                UPDATE episode_group SET num_final = size, state = 'COMPLETE', completed_at = clock_timestamp()
                 WHERE id = :group_id AND EXISTS (SELECT FROM gone)
            )
            SELECT count(*) FROM gone
            """
        ),
        {"group_id": group_id, "final": sorted(FINAL_STATES), "agent": sorted(AGENT_OUTCOMES), "why": WHY},
    ).scalar_one()
    return num_cancelled
