"""Runs that stand still: every group is dropped because its episodes fail, and new ones would fail as well.

The trainer asks while it waits for groups. A run that is found so is paused, with the reason on its row.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db import runs
from common.episode import RunState
from common.outcomes import Outcome

OUTAGE_S = 600.0
"""Infrastructure that fails for longer is not expected to heal by itself."""
MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """Groups that came to nothing while one version was waited for."""

    version: int
    """The version that was to be trained."""
    num_groups: int
    """Dropped ones of which an episode failed."""
    num_failed: int
    """Their FAILED episodes."""
    outcome: Outcome
    """The most frequent one among those."""
    num_outcome: int
    """FAILED episodes that have it."""
    episode_id: int
    """The newest of them."""
    detail: str
    """Its last error."""
    lasted_s: float
    """From the end of the first of these groups to that of the last."""

    @property
    def heals(self) -> bool:
        """Whether waiting may help: what fails is infrastructure, and not for long."""
        return not self.outcome.is_lasting and self.lasted_s <= OUTAGE_S

    def __str__(self) -> str:
        detail = textwrap.shorten(self.detail, MAX_DETAIL_CHARS, placeholder=" …")
        return (
            f"{self.num_groups:,} groups were dropped while version {self.version} was waited for; "
            f"{self.num_outcome:,} of their {self.num_failed:,} failed episodes: {self.outcome} "
            f"(e.g. episode {self.episode_id}: {detail})"
        )


def pause_if_still(conn: Connection, run_id: int, *, version: int, max_dropped: int) -> str | None:
    """Pause an ACTIVE run of which `max_dropped` groups or more came to nothing since it waits for `version`.

    Returns the reason, as it is stored; None = the run goes on, or was not ACTIVE.
    """
    found = find(conn, run_id, version=version)
    if found is None or found.num_groups < max_dropped or found.heals:
        return None
    if not runs.move(conn, run_id, RunState.PAUSED):
        return None
    runs.note_pause(conn, run_id, reason=str(found))
    return str(found)


def find(conn: Connection, run_id: int, *, version: int) -> Standstill | None:
    """What came to nothing since the run waits for `version` and was last resumed; None = nothing did."""
    row = conn.execute(
        text(
            """
            WITH failed AS (
                SELECT e.id, e.outcome, e.detail, e.group_id, g.completed_at
                  FROM episode_group g
                  JOIN run r ON r.id = g.run_id
                       -- Group by group, also where the statistics know nothing yet of failed episodes.
                  JOIN LATERAL (SELECT * FROM episode WHERE group_id = g.id OFFSET 0) e ON e.state = 'FAILED'
                 WHERE g.run_id = :run_id AND g.drop_reason = 'too_few_samples' AND g.dropped_version = :version
                   AND (r.resumed_at IS NULL OR g.created_at >= r.resumed_at)
            ), whole AS (
                SELECT count(DISTINCT group_id) AS num_groups, count(*) AS num_failed,
                       CAST(extract(epoch FROM max(completed_at) - min(completed_at)) AS float8) AS lasted_s
                  FROM failed
            ), most AS (
                SELECT outcome, count(*) AS num_outcome, max(id) AS episode_id
                  FROM failed GROUP BY outcome ORDER BY num_outcome DESC, outcome LIMIT 1
            )
            SELECT whole.*, most.*, coalesce(failed.detail, '') AS detail
              FROM whole, most JOIN failed ON failed.id = most.episode_id
            """
        ),
        {"run_id": run_id, "version": version},
    ).first()
    if row is None:
        return None
    return Standstill(**{**row._mapping, "outcome": Outcome(row.outcome)}, version=version)
