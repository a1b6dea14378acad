"""Cancelling episodes: one statement takes them to CANCELLED wherever they stand, and always answers.

The claim token goes with it, so whoever works on one writes nothing more, and its next heartbeat stops the work; the
reaper removes the sandbox. Turns that are stored stay. A cancelled episode counts as final in its group and is never
trained: the group completes with the others, and is dropped as any group is in which fewer than two are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db.episodes import count_final
from common.db.stragglers import CANCEL_HELD
from common.episode import FINAL_STATES, EpisodeState
from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What a cancellation did."""

    num_cancelled: int
    num_at_work: int
    """Those of them that a worker had claimed; it stops at its next heartbeat."""
    already_final: Counter[EpisodeState]
    """Episodes that had ended before, by state: they stay as they are."""


def cancel_episodes(conn: Connection, ids: Collection[int], *, why: str) -> Cancelled:
    """Cancel these episodes. Raises SetupError that names the unknown ones, and then cancels none."""
    _require(conn, "episode", ids)
    return _cancel(conn, "id = ANY(CAST(:ids AS bigint[]))", list(ids), why=why)


def cancel_groups(conn: Connection, ids: Collection[int], *, why: str) -> Cancelled:
    """Cancel all episodes of these groups. Raises SetupError that names the unknown ones, and then cancels none."""
    _require(conn, "episode_group", ids)
    return _cancel(conn, "group_id = ANY(CAST(:ids AS bigint[]))", list(ids), why=why)


def cancel_run(conn: Connection, run_id: int, *, why: str) -> Cancelled:
    """Cancel all episodes that the run has now; while it is ACTIVE, its feeder makes new ones."""
    return _cancel(conn, "run_id = ANY(CAST(:ids AS bigint[]))", [run_id], why=why)


def _require(conn: Connection, table: str, ids: Collection[int]) -> None:
    known = conn.execute(text(f"SELECT id FROM {table} WHERE id = ANY(CAST(:ids AS bigint[]))"), {"ids": list(ids)})
    if unknown := sorted(set(ids) - set(known.scalars())):
        kind = "group" if table == "episode_group" else table
        raise SetupError(f"no {kind} {', '.join(map(str, unknown))} in the database; nothing was cancelled")


def _cancel(conn: Connection, where: str, ids: list[int], *, why: str) -> Cancelled:
    """Lock order as everywhere: episodes by id, then groups by id; a move that is under way is waited for."""
    rows = conn.execute(
        text(
            f"""
            WITH held AS (
                SELECT id, state, claim_worker FROM episode
                 WHERE {where} AND state <> ALL(:final) ORDER BY id FOR UPDATE
            ), {CANCEL_HELD}
            SELECT group_id, claim_worker FROM gone
            """
        ),
        {"ids": ids, "final": sorted(FINAL_STATES), "why": why},
    ).all()
    count_final(conn, [row.group_id for row in rows])
    return Cancelled(
        num_cancelled=len(rows),
        num_at_work=sum(row.claim_worker is not None for row in rows),
        already_final=_final(conn, where, ids) - Counter({EpisodeState.CANCELLED: len(rows)}),
    )


def _final(conn: Connection, where: str, ids: list[int]) -> Counter[EpisodeState]:
    rows = conn.execute(
        text(f"SELECT state, count(*) AS num FROM episode WHERE {where} AND state = ANY(:final) GROUP BY state"),
        {"ids": ids, "final": sorted(FINAL_STATES)},
    )
    return Counter({EpisodeState(row.state): row.num for row in rows})
