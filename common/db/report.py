"""How a run went, for the final report: every episode accounted for, and what must be zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db import evaluations, snapshot, step_troubles, stragglers
from common.db.evaluations import Evaluation
from common.db.snapshot import EpisodeFailure
from common.db.step_troubles import StepTrouble
from common.episode import DropReason, RunState
from common.outcomes import AGENT_OUTCOMES, Outcome


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run went. Every episode is counted in exactly one of the `episodes_*` fields up to `episodes_lost`.

    Those that evaluate versions are not the training's, and stand in `evaluations` alone; tokens and failures are of
    all.
    """

    state: RunState
    step_trouble: StepTrouble | None
    """How the step after the newest version failed; None = it did not."""
    versions: tuple[int, ...]
    """Numbers of the published policy versions, in order."""
    mean_reward_by_version: tuple[float | None, ...]
    """[number of versions to train] of the scored episodes whose oldest token is of version 0, 1, 2 …; None = none."""
    episodes_total: int
    episodes_trained: int
    episodes_failed: int
    episodes_cancelled: int
    """Stragglers among them."""
    episodes_stragglers: int
    """Cancelled as their over-sampled group had enough scores."""
    episodes_stale: int
    """Scored, but their group was dropped as too stale."""
    episodes_dropped_other: int
    """Scored, but their group was dropped for want of a baseline."""
    episodes_dropped_zero_variance: int
    """Scored, but their group had no variance and was dropped, to be replaced by another."""
    episodes_untrainable: int
    """Scored in a trained group, with nothing to train: the agent never sampled."""
    episodes_in_flight: int
    """Not settled, while the run may still settle them."""
    episodes_lost: int
    """Not settled, and nothing will settle them: must be 0."""
    episodes_left_out: int | None
    """Cut off for their length and left out of the loss of their group's step, which had them in its baseline. None =
    no finished step notes it."""
    groups_trained: int
    groups_trained_zero_variance: int | None
    """Those among them without variance: the rewards all equal, with pass@k those of all teams; None as above."""
    episodes_trained_twice: int
    """Trained by another step than their group's, or by two: must be 0."""
    lag_max: int | None
    """Largest (version trained - oldest version sampled) of a trained episode; None = nothing was trained."""
    lag_mean: float | None
    token_mismatches: int
    """Trained episodes whose digest in the trainer differs from that of the turns as sampled: must be 0."""
    logprob_gap_max: float | None
    """Largest |trainer - engine| log-probability of a token of the version being trained, in nats; None = no such
    token was compared."""
    tokens_sampled: int
    """Over all attempts, the lost ones included."""
    histories_rewritten: int
    """Turns that began a new training row, since their prompt did not go on from the turns before; lost attempts
    included."""
    attempts: int
    """Over all episodes; more than `episodes_total` where attempts were started afresh."""
    outcomes: Mapping[str, int]
    """Episodes by outcome."""
    failures: Mapping[str, int]
    """Broken attempts by kind, those that were tried again included: the handler's own errors, and infrastructure's."""
    last_failure: EpisodeFailure | None
    """The latest of them; None = there is none."""
    groups_dropped: Mapping[DropReason, int]
    """By reason; reasons that dropped none are absent."""
    evaluations: tuple[Evaluation, ...] = ()
    """Of the versions that were evaluated on held-out tasks, in order."""


def summary(conn: Connection, run_id: int) -> Summary:
    """How the run went so far."""
    row = conn.execute(
        text(
            """
            SELECT name, state, CAST(config -> 'train' ->> 'num_versions' AS int) AS num_versions
              FROM run WHERE id = :id
            """
        ),
        {"id": run_id},
    ).one()
    state = RunState(row.state)
    fates = _fates(conn, run_id)
    over = state in (RunState.FINISHED, RunState.STOPPED)
    trained = _trained(conn, run_id)
    steps = _steps(conn, run_id)
    sampled = _sampled(conn, run_id)
    failures, last_failure = _failures(conn, run_id)
    return Summary(
        state=state,
        step_trouble=step_troubles.find(conn, run_id),
        versions=_versions(conn, run_id),
        mean_reward_by_version=_reward_by_version(conn, run_id, row.num_versions),
        episodes_total=fates.total(),
        episodes_trained=fates["trained"],
        episodes_failed=fates["failed"],
        episodes_cancelled=fates["cancelled"] + fates["straggler"],
        episodes_stragglers=fates["straggler"],
        episodes_stale=fates["stale"],
        episodes_dropped_other=fates["dropped"],
        episodes_dropped_zero_variance=fates["zero_variance"],
        episodes_untrainable=fates["untrainable"],
        episodes_in_flight=0 if over else fates["in_flight"],
        episodes_lost=fates["lost"] + (fates["in_flight"] if over else 0),
        episodes_left_out=steps.left_out,
        groups_trained=steps.groups,
        groups_trained_zero_variance=steps.zero_variance,
        episodes_trained_twice=trained.twice,
        lag_max=trained.lag_max,
        lag_mean=trained.lag_mean,
        token_mismatches=trained.mismatches,
        logprob_gap_max=steps.gap_max,
        tokens_sampled=sampled.tokens,
        histories_rewritten=sampled.rewritten,
        attempts=sampled.attempts,
        outcomes=sampled.outcomes,
        failures=failures,
        last_failure=last_failure,
        groups_dropped=snapshot.groups_dropped(conn, run_id),
        evaluations=evaluations.results(conn, row.name),
    )


def _fates(conn: Connection, run_id: int) -> Counter[str]:
    """What became of each episode; `in_flight` is lost when the run is over.

    An episode is also lost when its group went on without it, or was trained and left it out.
    """
    rows = conn.execute(
        text(
            """
            SELECT CASE WHEN x.episode_id IS NOT NULL THEN 'trained'
                        WHEN g.state NOT IN ('TRAINED', 'DROPPED') THEN 'in_flight'
                        WHEN e.state = 'FAILED' THEN 'failed'
                        WHEN e.state = 'CANCELLED' AND e.detail = :straggler THEN 'straggler'
                        WHEN e.state = 'CANCELLED' THEN 'cancelled'
                        WHEN e.state <> 'SCORED' THEN 'lost'
                        WHEN g.drop_reason IN ('stale', 'zero_variance') THEN g.drop_reason
                        WHEN g.state = 'DROPPED' THEN 'dropped'
                        WHEN e.num_turns = 0 OR e.outcome <> ALL(CAST(:agent AS text[])) THEN 'untrainable'
                        ELSE 'lost' END AS fate,
                   count(*) AS num
              FROM episode e
              JOIN episode_group g ON g.id = e.group_id
              LEFT JOIN trained_episode x ON x.episode_id = e.id
             WHERE e.run_id = :run_id AND e.eval_version IS NULL GROUP BY 1
            """
        ),
        {"run_id": run_id, "agent": sorted(AGENT_OUTCOMES), "straggler": stragglers.WHY},
    )
    return Counter({row.fate: row.num for row in rows})


@dataclass(frozen=True, kw_only=True)
class _Trained:
    twice: int
    lag_max: int | None
    lag_mean: float | None
    mismatches: int


def _trained(conn: Connection, run_id: int) -> _Trained:
    """Figures over the trained episodes. Their digests are computed anew here, from the turns as they were stored."""
    row = conn.execute(
        text(
            """
            SELECT count(*) - count(DISTINCT e.id) + count(*) FILTER (WHERE x.step_id IS DISTINCT FROM g.step_id)
                       AS twice,
                   max(s.version_in - e.version_min) AS lag_max,
                   CAST(avg(s.version_in - e.version_min) AS float8) AS lag_mean,
                   count(*) FILTER (WHERE x.digest IS DISTINCT FROM d.digest) AS mismatches
              FROM train_step s
              JOIN trained_episode x ON x.step_id = s.id
              JOIN episode e ON e.id = x.episode_id
              JOIN episode_group g ON g.id = e.group_id
              LEFT JOIN LATERAL (SELECT sha256(string_agg(t.digest, CAST('' AS bytea) ORDER BY t.index)) AS digest
                                   FROM turn t WHERE t.episode_id = e.id AND t.attempt = e.attempt) d ON true
             WHERE s.run_id = :run_id
            """
        ),
        {"run_id": run_id},
    ).one()
    return _Trained(twice=row.twice, lag_max=row.lag_max, lag_mean=row.lag_mean, mismatches=row.mismatches)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    groups: int
    zero_variance: int | None
    left_out: int | None
    gap_max: float | None


def _steps(conn: Connection, run_id: int) -> _Steps:
    """Figures over the finished steps, as the trainer noted them."""
    row = conn.execute(
        text(
            """
            SELECT CAST(coalesce(sum(num_groups), 0) AS int) AS groups,
                   CAST(sum(CAST(metrics ->> 'zero_variance_groups' AS float8)) AS int) AS zero_variance,
                   CAST(sum(CAST(metrics ->> 'left_out_episodes' AS float8)) AS int) AS left_out,
                   max(CAST(metrics ->> 'logprob_gap_max' AS float8)) AS gap_max
              FROM train_step WHERE run_id = :run_id AND state = 'DONE'
            """
        ),
        {"run_id": run_id},
    ).one()
    return _Steps(**row._mapping)


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    tokens: int
    rewritten: int
    attempts: int
    outcomes: dict[str, int]


def _sampled(conn: Connection, run_id: int) -> _Sampled:
    turns = conn.execute(
        text(
            """
            SELECT coalesce(sum(t.num_sampled), 0) AS tokens,
                   count(DISTINCT (t.episode_id, t.attempt, t.sample)) FILTER (WHERE t.sample > 0) AS rewritten
              FROM turn t JOIN episode e ON e.id = t.episode_id WHERE e.run_id = :run_id
            """
        ),
        {"run_id": run_id},
    ).one()
    rows = conn.execute(
        text(
            """
            SELECT outcome, count(*) AS num, sum(attempt) AS attempts FROM episode
             WHERE run_id = :run_id AND eval_version IS NULL GROUP BY outcome ORDER BY num DESC, outcome
            """
        ),
        {"run_id": run_id},
    ).all()
    return _Sampled(
        tokens=turns.tokens,
        rewritten=turns.rewritten,
        attempts=sum(row.attempts for row in rows),
        outcomes={row.outcome: row.num for row in rows if row.outcome is not None},
    )


def _failures(conn: Connection, run_id: int) -> tuple[dict[str, int], EpisodeFailure | None]:
    """(number by kind, the latest). From the history: an episode's row keeps only its last error."""
    rows = conn.execute(
        text(
            """
            SELECT split_part(v.why, ':', 1) AS kind, count(*) AS num, max(v.id) AS last_id
              FROM episode_event v JOIN episode e ON e.id = v.episode_id
             WHERE e.run_id = :run_id AND split_part(v.why, ':', 1) = ANY(CAST(:kinds AS text[]))
             GROUP BY 1 ORDER BY 2 DESC, 1
            """
        ),
        {"run_id": run_id, "kinds": sorted(set(Outcome) - AGENT_OUTCOMES)},
    ).all()
    last = conn.execute(
        text("SELECT episode_id, why FROM episode_event WHERE id = :id"),
        {"id": max((row.last_id for row in rows), default=None)},
    ).first()
    return {row.kind: row.num for row in rows}, None if last is None else EpisodeFailure(**last._mapping)


def _versions(conn: Connection, run_id: int) -> tuple[int, ...]:
    rows = conn.execute(
        text("SELECT number FROM policy_version WHERE run_id = :run_id ORDER BY number"), {"run_id": run_id}
    )
    return tuple(row.number for row in rows)


def _reward_by_version(conn: Connection, run_id: int, num_versions: int) -> tuple[float | None, ...]:
    rows = conn.execute(
        text(
            """
            SELECT version_min AS version, avg(greatest(least(reward, 1e6), -1e6)) AS mean FROM episode
             WHERE run_id = :run_id AND eval_version IS NULL AND state = 'SCORED' AND version_min IS NOT NULL
             GROUP BY version_min
            """
        ),
        {"run_id": run_id},
    )
    means = {row.version: row.mean for row in rows}
    return tuple(means.get(version) for version in range(num_versions))
