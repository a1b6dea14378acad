"""Sandboxes: recorded when INIT makes one, so that somebody removes each."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db.episodes import Claim
from common.errors import LeaseLost


@dataclass(frozen=True, kw_only=True)
class SandboxRow:
    """A sandbox that is not known to be gone."""

    id: int
    handle: str


def record(conn: Connection, claim: Claim, *, backend: str, node: str, handle: str) -> None:
    """Note a sandbox before it is made, so that a crash in between leaves a row and not an orphan."""
    check_claim(conn, claim)
    conn.execute(
        text(
            """
            INSERT INTO sandbox (episode_id, attempt, backend, node, handle)
            VALUES (:episode_id, :attempt, :backend, :node, :handle)
            ON CONFLICT (episode_id, attempt) DO NOTHING
            """
        ),
        {
            "episode_id": claim.episode_id,
            "attempt": claim.attempt,
            "backend": backend,
            "node": node,
            "handle": handle,
        },
    )


def check_claim(conn: Connection, claim: Claim) -> None:
    """Raise LeaseLost if the claim no longer holds; otherwise it does until the transaction ends."""
    held = conn.execute(
        text("SELECT id FROM episode WHERE id = :id AND claim_token = :token FOR SHARE"),
        {"id": claim.episode_id, "token": claim.token},
    ).first()
    if held is None:
        raise LeaseLost(f"episode {claim.episode_id}: the claim of {claim.worker} is gone")


def orphans(conn: Connection, *, node: str, limit: int = 200) -> list[SandboxRow]:
    """Sandboxes of this node whose episode is final or has started a newer attempt."""
    rows = conn.execute(
        text(
            """
            SELECT s.id, s.handle FROM sandbox s JOIN episode e ON e.id = s.episode_id
             WHERE s.destroyed_at IS NULL AND s.node = :node
               AND (e.attempt > s.attempt OR e.state IN ('SCORED', 'FAILED', 'CANCELLED'))
             ORDER BY s.id LIMIT :limit
            """
        ),
        {"node": node, "limit": limit},
    )
    return [SandboxRow(id=row.id, handle=row.handle) for row in rows]


def destroyed(conn: Connection, ids: list[int]) -> None:
    """These sandboxes are gone."""
    conn.execute(text("UPDATE sandbox SET destroyed_at = now() WHERE id = ANY(:ids)"), {"ids": ids})
