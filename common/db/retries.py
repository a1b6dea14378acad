"""Episodes that go round again, or fail for good: after an infrastructure failure, a lost lease, an orderly shutdown.

Compare-and-set and an event for each, as in `episodes`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, text

from common.db.episodes import UNCLAIM, Claim, Wakeup, count_final
from common.db.nodes import WAITS_FOR_NODE
from common.episode import EpisodeState
from common.errors import LeaseLost
from common.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long an episode waits after a failure: not after its first, then `first_s`, and twice as long each time."""

    first_s: float
    max_s: float
    """The longest wait."""


AT_ONCE = Backoff(first_s=0.0, max_s=0.0)
"""No waiting between tries."""


def retry(
    conn: Connection,
    claim: Claim,
    *,
    outcome: Outcome,
    detail: str,
    afresh: bool,
    max_attempts: int,
    backoff: Backoff = AT_ONCE,
) -> Wakeup | None:
    """End the claim after a failure of infrastructure: once more while attempts last, else FAILED.

    `afresh` starts a new attempt from INIT; otherwise the same stage goes on from what is stored. Returns the
    message to send now, None when it is FAILED or has to wait until `resend`. Raises LeaseLost if the claim is gone.
    """
    rows = _give_back(
        conn,
        "id = :id AND claim_token = :token",
        {"id": claim.episode_id, "token": claim.token},
        afresh="true" if afresh else "false",
        outcome=outcome,
        detail=detail,
        max_attempts=max_attempts,
        backoff=backoff,
    )
    if rows is None:
        raise LeaseLost(f"episode {claim.episode_id} attempt {claim.attempt}: the claim of {claim.worker} is gone")
    return rows[0] if rows else None


def release(conn: Connection, tokens: Collection[UUID], *, why: str) -> list[Wakeup]:
    """Hand claims back on an orderly shutdown, at no cost in attempts; returns the messages to send.

    An episode with a sandbox starts a new attempt: its last command may have been half done.
    """
    rows = conn.execute(
        text(
            f"""
            WITH held AS (
                SELECT id, state, claim_worker, {_NEEDS_SANDBOX} AS afresh,
                       CASE WHEN {_NEEDS_SANDBOX} THEN 'NEW' ELSE state END AS to_state
                  FROM episode WHERE claim_token = ANY(CAST(:tokens AS uuid[])) FOR UPDATE
            ), back AS (
                UPDATE episode e SET {UNCLAIM}, {_START_OVER} FROM held WHERE e.id = held.id
                RETURNING e.id, e.attempt, held.state AS was, e.state, e.node, held.claim_worker
            ), noted AS (
                INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
                SELECT id, attempt, was, state, claim_worker, :why FROM back
            )
            SELECT id, attempt, state, node FROM back
            """
        ),
        {"tokens": [str(token) for token in tokens], "why": why},
    )
    return [Wakeup.of(row) for row in rows]


def reap(conn: Connection, *, max_attempts: int, backoff: Backoff = AT_ONCE, limit: int = 500) -> list[Wakeup]:
    """Take back episodes whose lease ran out; safe to run many at once. Returns the messages to send now.

    INIT starts a new attempt; RUN too if it has a sandbox, else it goes on from its stored turns; EVAL goes on.
    """
    return (
        _give_back(
            conn,
            "id IN (SELECT id FROM episode WHERE claim_token IS NOT NULL AND lease_until < now()"
            " ORDER BY lease_until LIMIT :limit FOR UPDATE SKIP LOCKED)",
            {"limit": limit},
            afresh=_NEEDS_SANDBOX,
            outcome=Outcome.LEASE_LOST,
            detail="the worker died or stalled: its lease ran out",
            max_attempts=max_attempts,
            backoff=backoff,
        )
        or []
    )


def leave_node(
    conn: Connection, node: str, *, silent_s: float, max_attempts: int, backoff: Backoff = AT_ONCE, limit: int = 500
) -> list[Wakeup]:
    """Start a new attempt of episodes that wait for a node; safe to run many at once. Returns the messages to send now.

    None are taken from a node on which RUN was alive within `silent_s`. Claimed ones are `reap`'s.
    """
    return (
        _give_back(
            conn,
            f"id IN (SELECT id FROM episode WHERE {WAITS_FOR_NODE} AND node = :node AND NOT EXISTS (SELECT FROM node n"
            " WHERE n.name = :node AND n.seen_at > now() - :silent_s * interval '1 second')"
            " ORDER BY enqueued_at LIMIT :limit FOR UPDATE SKIP LOCKED)",
            {"node": node, "silent_s": silent_s, "limit": limit},
            afresh="true",
            outcome=Outcome.NODE_LOST,
            detail=f"its sandbox lies on node {node}, where no RUN fleet lives any more",
            max_attempts=max_attempts,
            backoff=backoff,
        )
        or []
    )


_NEEDS_SANDBOX = "(state = 'NEW' OR (state = 'READY' AND prepared -> 'sandbox' <> 'null'))"
_START_OVER = """
    state = held.to_state,
    attempt = e.attempt + CASE WHEN held.afresh THEN 1 ELSE 0 END,
    node = CASE WHEN held.afresh THEN NULL ELSE e.node END,
    num_turns = CASE WHEN held.afresh THEN 0 ELSE e.num_turns END,
    num_sampled = CASE WHEN held.afresh THEN 0 ELSE e.num_sampled END,
    version_min = CASE WHEN held.afresh THEN NULL ELSE e.version_min END,
    version_max = CASE WHEN held.afresh THEN NULL ELSE e.version_max END"""


def _give_back(
    conn: Connection,
    where: str,
    params: dict[str, Any],
    *,
    afresh: str,
    outcome: Outcome,
    detail: str,
    max_attempts: int,
    backoff: Backoff,
) -> list[Wakeup] | None:
    """Count a failure of the episodes that match, and send them round again or fail them. None = none matched."""
    rows = conn.execute(
        text(
            f"""
            WITH held AS (
                SELECT id, state, claim_worker, failures + 1 < :max_attempts AND {afresh} AS afresh,
                       CASE WHEN failures + 1 >= :max_attempts THEN 'FAILED'
                            WHEN {afresh} THEN 'NEW' ELSE state END AS to_state
                  FROM episode WHERE {where} FOR UPDATE
            ), back AS (
                UPDATE episode e
                   SET {UNCLAIM}, {_START_OVER}, failures = e.failures + 1, detail = :detail,
                       not_before = CASE
                           WHEN held.to_state <> 'FAILED' AND e.failures > 0 AND CAST(:first_s AS float8) > 0
                           THEN now() + least(:first_s * power(2, least(e.failures, 40) - 1), :max_s)
                                      * interval '1 second' END,
                       outcome = CASE WHEN held.to_state = 'FAILED' THEN :outcome ELSE e.outcome END,
                       finished_at = CASE WHEN held.to_state = 'FAILED' THEN clock_timestamp() END
                  FROM held WHERE e.id = held.id
                RETURNING e.id, e.attempt, held.state AS was, e.state, e.node, held.claim_worker, e.group_id,
                          e.not_before
            ), noted AS (
                INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
                SELECT id, attempt, was, state, claim_worker, :why FROM back
            )
            SELECT id, attempt, state, node, group_id, not_before FROM back
            """
        ),
        {
            **params,
            "outcome": outcome,
            "detail": detail,
            "max_attempts": max_attempts,
            "first_s": backoff.first_s,
            "max_s": backoff.max_s,
            "why": f"{outcome}: {detail}",
        },
    ).all()
    if not rows:
        return None
    count_final(conn, [row.group_id for row in rows if row.state == EpisodeState.FAILED])
    return [Wakeup.of(row) for row in rows if row.state != EpisodeState.FAILED and row.not_before is None]
