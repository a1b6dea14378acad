"""What must hold of a run when it is over, whatever was killed meanwhile. Each check counts its violations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from sqlalchemy import Connection, text

from common.episode import FINAL_STATES
from common.outcomes import AGENT_OUTCOMES

CHECKS: Mapping[str, str] = MappingProxyType(
    {
        # An episode that no longer moves although it is not final.
        "lost": "SELECT count(*) FROM episode WHERE run_id = :run_id AND state <> ALL(CAST(:final AS text[]))",
        "groups_miscounted": """
            SELECT count(*) FROM episode_group g
             WHERE run_id = :run_id
               AND (g.num_final <> g.size OR g.size <> (SELECT count(*) FROM episode WHERE group_id = g.id))
        """,
        "groups_unsettled": """
            SELECT count(*) FROM episode_group
             WHERE run_id = :run_id AND state NOT IN ('TRAINED', 'DROPPED', 'EVALUATED')
        """,
        # Trained by another step than the group's own, by an unfinished one, or although it was dropped.
        "doubled": """
            SELECT count(*) FROM trained_episode x
              JOIN episode e ON e.id = x.episode_id
              JOIN episode_group g ON g.id = e.group_id
              JOIN train_step s ON s.id = x.step_id
             WHERE e.run_id = :run_id AND (g.step_id <> x.step_id OR g.state <> 'TRAINED' OR s.state <> 'DONE')
        """,
        "steps_doubled": """
            SELECT count(*) - count(DISTINCT version_in) FROM train_step WHERE run_id = :run_id
        """,
        # Episodes with an agent outcome in a trained group, which did not enter its loss.
        "left_out": """
            SELECT count(*) FROM episode e
              JOIN episode_group g ON g.id = e.group_id AND g.state = 'TRAINED'
             WHERE e.run_id = :run_id AND e.state = 'SCORED' AND e.num_turns > 0
               AND e.outcome = ANY(CAST(:agent AS text[]))
               AND NOT EXISTS (SELECT FROM trained_episode WHERE episode_id = e.id)
        """,
        # Dropped groups that had a baseline and were no older than the bound at the run's last step, but for those
        # without variance that the run was to replace, and those that a trainer of one's own could not take.
        "dropped_fresh": """
            SELECT count(*) FROM episode_group g
              JOIN run r ON r.id = g.run_id
              JOIN LATERAL (SELECT min(version_min) FILTER (WHERE state = 'SCORED') AS oldest,
                                   array_agg(reward ORDER BY reward)
                                   FILTER (WHERE state = 'SCORED' AND outcome = ANY(CAST(:agent AS text[]))) AS rewards,
                                   coalesce(CAST(r.config -> 'train' ->> 'pass_k' AS int), 1) AS lone
                              FROM episode WHERE group_id = g.id) e ON true
             WHERE g.run_id = :run_id AND g.state = 'DROPPED' AND g.eval_version IS NULL AND cardinality(e.rewards) >= 2
               AND e.oldest >= (SELECT max(version_in) FROM train_step WHERE run_id = :run_id)
                               - CAST(r.config -> 'train' ->> 'max_staleness' AS int)
               AND g.drop_reason IS DISTINCT FROM 'uneven'
               AND NOT (g.drop_reason = 'zero_variance'
                        AND (cardinality(e.rewards) <= e.lone
                             OR e.rewards[e.lone] = e.rewards[cardinality(e.rewards)])
                        AND r.config -> 'train' ->> 'zero_variance' = 'refill')
        """,
        # Episodes of trained groups that were older at their step than the run allows. Failed siblings may be of any
        # age: they are not trained.
        "trained_stale": """
            SELECT count(*) FROM episode e
              JOIN episode_group g ON g.id = e.group_id AND g.state = 'TRAINED'
              JOIN train_step s ON s.id = g.step_id
              JOIN run r ON r.id = e.run_id
             WHERE e.run_id = :run_id AND e.state = 'SCORED'
               AND e.version_min < s.version_in - CAST(r.config -> 'train' ->> 'max_staleness' AS int)
        """,
        # Evaluation episodes that were trained, that are in a group of another kind, or whose tokens are not all of
        # the version that they evaluate; and evaluations that are not over.
        "evaluations_wrong": """
            SELECT (SELECT count(*) FROM episode e
                      JOIN episode_group g ON g.id = e.group_id
                      LEFT JOIN trained_episode x ON x.episode_id = e.id
                     WHERE e.run_id = :run_id
                       AND (e.eval_version IS DISTINCT FROM g.eval_version
                            OR e.eval_version IS NOT NULL AND x.episode_id IS NOT NULL
                            OR e.eval_version <> e.version_min OR e.eval_version <> e.version_max))
                 + (SELECT count(*) FROM evaluation_point WHERE run_id = :run_id AND finished_at IS NULL)
        """,
        "turns_doubled": """
            SELECT count(*) - count(DISTINCT (t.episode_id, t.attempt, t.index))
              FROM turn t JOIN episode e ON e.id = t.episode_id WHERE e.run_id = :run_id
        """,
        # Attempts whose turns are not 0, 1, 2 …, and last attempts with another number than the episode says.
        "turn_gaps": """
            SELECT count(*) FROM (
                SELECT e.id FROM turn t JOIN episode e ON e.id = t.episode_id
                 WHERE e.run_id = :run_id GROUP BY e.id, t.attempt
                HAVING count(*) <> max(t.index) + 1 OR min(t.index) <> 0
                UNION ALL
                SELECT e.id FROM episode e LEFT JOIN turn t ON t.episode_id = e.id AND t.attempt = e.attempt
                 WHERE e.run_id = :run_id GROUP BY e.id HAVING count(t.id) <> e.num_turns) AS wrong
        """,
        # Attempts whose samples are not 0, 1, 2 … in the order of their turns.
        "sample_gaps": """
            SELECT count(DISTINCT id) FROM (
                SELECT e.id, t.sample, lag(t.sample) OVER (PARTITION BY e.id, t.attempt ORDER BY t.index) AS before
                  FROM turn t JOIN episode e ON e.id = t.episode_id WHERE e.run_id = :run_id) AS ordered
             WHERE sample - coalesce(before, 0) NOT IN (0, 1) OR (before IS NULL AND sample <> 0)
        """,
        # Stored ids or log-probs that are not what came over the wire.
        "turns_damaged": """
            SELECT count(*) FROM turn t
              JOIN episode e ON e.id = t.episode_id
              LEFT JOIN turn_tokens k ON k.turn_id = t.id
             WHERE e.run_id = :run_id AND t.digest IS DISTINCT FROM sha256(k.sampled_ids || k.logprobs)
        """,
        # Trained episodes whose arrays in the loss were not those of their turns.
        "token_mismatches": """
            SELECT count(*) FROM trained_episode x
              JOIN episode e ON e.id = x.episode_id
              LEFT JOIN LATERAL (SELECT sha256(string_agg(t.digest, CAST('' AS bytea) ORDER BY t.index)) AS digest
                                   FROM turn t WHERE t.episode_id = e.id AND t.attempt = e.attempt) d ON true
             WHERE e.run_id = :run_id AND x.digest IS DISTINCT FROM d.digest
        """,
        "sandboxes_left": """
            SELECT count(*) FROM sandbox s JOIN episode e ON e.id = s.episode_id
             WHERE e.run_id = :run_id AND s.destroyed_at IS NULL
        """,
        # Infrastructure never gives a reward, and nothing but a score does.
        "infra_rewards": """
            SELECT count(*) FROM episode
             WHERE run_id = :run_id
               AND (state = 'SCORED' AND (outcome IS NULL OR outcome <> ALL(CAST(:agent AS text[])))
                    OR state <> 'SCORED' AND reward IS NOT NULL)
        """,
        # Moves that do not begin where the one before ended, and histories that do not end where the episode stands.
        "broken_histories": """
            SELECT count(DISTINCT id) FROM (
                SELECT e.id, v.from_state, e.state, v.to_state,
                       lag(v.to_state) OVER history AS before, lead(v.id) OVER history AS next
                  FROM episode e LEFT JOIN episode_event v ON v.episode_id = e.id
                 WHERE e.run_id = :run_id WINDOW history AS (PARTITION BY e.id ORDER BY v.id)) AS moves
             WHERE from_state IS DISTINCT FROM before OR (next IS NULL AND to_state IS DISTINCT FROM state)
        """,
    }
)
"""Name -> a query that counts what breaks the promise. All must be 0 when a run is over."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A worker process that was killed."""

    worker: str
    """Its name in `episode_event.worker`."""
    at: datetime
    """When; with a time zone."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """An episode that a killed worker held, from the kill on. Seconds."""

    taken_back_s: float
    """Until its lease had run out and a reaper had taken it back."""
    resumed_s: float | None
    """Until its next move or turn; None = none came."""


def violations(conn: Connection, run_id: int) -> dict[str, int]:
    """Each check's count."""
    given = {"run_id": run_id, "final": sorted(FINAL_STATES), "agent": sorted(AGENT_OUTCOMES)}
    return {name: conn.execute(text(query), given).scalar_one() for name, query in CHECKS.items()}


def resumptions(conn: Connection, run_id: int, kills: Sequence[Kill]) -> list[Resumption]:
    """How long the episodes stood still that the killed workers held."""
    rows = conn.execute(
        text(
            """
            SELECT extract(epoch FROM v.at - kill.at) AS taken_back_s,
                   extract(epoch FROM next.at - kill.at) AS resumed_s
              FROM unnest(CAST(:workers AS text[]), CAST(:ats AS timestamptz[])) AS kill (worker, at)
              JOIN episode_event v ON v.worker = kill.worker AND v.at > kill.at AND v.why LIKE 'lease_lost:%'
              JOIN episode e ON e.id = v.episode_id AND e.run_id = :run_id
              LEFT JOIN LATERAL (SELECT min(later.at) AS at FROM (
                    SELECT at FROM episode_event WHERE episode_id = v.episode_id AND id > v.id
                    UNION ALL
                    SELECT created_at FROM turn WHERE episode_id = v.episode_id AND created_at > v.at) AS later) next
                ON true
             WHERE v.to_state <> 'FAILED'
            """
        ),
        {"run_id": run_id, "workers": [kill.worker for kill in kills], "ats": [kill.at for kill in kills]},
    )
    return [
        Resumption(
            taken_back_s=float(row.taken_back_s),
            resumed_s=None if row.resumed_s is None else float(row.resumed_s),
        )
        for row in rows
    ]
