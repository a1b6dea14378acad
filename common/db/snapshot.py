"""How a run stands at one moment, cheap enough to be asked twice a second by the live display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db import engines, evaluations, runs, step_troubles
from common.db.evaluations import Evaluation
from common.db.runs import Run
from common.db.step_troubles import StepTrouble
from common.episode import DropReason, EpisodeState, GroupState, RunState, Stage
from common.outcomes import AGENT_OUTCOMES, Outcome

TROUBLED_LOOKED_AT = 20


@dataclass(frozen=True, kw_only=True)
class StageCounts:
    """Where a run's episodes stand for one stage."""

    waiting: int
    """No worker has them."""
    working: int
    """A worker has claimed them."""
    done: int
    """They went past the stage; failed and cancelled ones are not counted."""


@dataclass(frozen=True, kw_only=True)
class VersionReward:
    """How the episodes did whose oldest token is of one policy version."""

    version: int
    episodes: int
    mean_reward: float


@dataclass(frozen=True, kw_only=True)
class EpisodeFailure:
    """What broke an attempt at an episode."""

    episode_id: int
    why: str
    """Kind and what happened, as "handler_failed: run of …"."""

    def __str__(self) -> str:
        return f"episode {self.episode_id}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """How a run stands at one moment."""

    state: RunState
    error: str | None
    """Why the run cannot be fed; None = it can."""
    pause_reason: str | None
    """Why the trainer paused the run; None = it is not paused, or somebody did it by hand."""
    step_trouble: StepTrouble | None
    """How the open training step failed; None = it did not, or none is open."""
    engine_trouble: str | None
    """Why no engine serves the run; None = one does, or the first are still starting."""
    stages: Mapping[Stage, StageCounts]
    episodes: Mapping[EpisodeState, int]
    """Every state has an entry."""
    groups: Mapping[GroupState, int]
    """Every state has an entry."""
    version_newest: int | None
    """Newest published policy version; None = the trainer has not published its start weights yet."""
    version_live: int | None
    """Oldest version that an engine still samples from; None = no engine serves the run yet."""
    lag_last: int | None
    """Largest staleness in the last finished training step, in versions; None = none is finished."""
    lag_max: int | None
    """Largest staleness in any finished training step."""
    tokens_sampled: int
    """Over all episodes, in their present attempt."""
    rewards: tuple[VersionReward, ...]
    """Versions that have scored episodes of the training, in order."""
    last_failure: EpisodeFailure | None
    """The latest of an episode that is FAILED, or that is tried again because its handler raised; None = there is
    none."""
    evaluations: tuple[Evaluation, ...] = ()
    """Of the latest versions that are evaluated, in order: the last that is over, and those after it."""


def take_snapshot(conn: Connection, run_id: int) -> Snapshot:
    """How the run stands: one pass over its episodes, some 5 ms per ten thousand of them."""
    episodes: Counter[EpisodeState] = Counter(dict.fromkeys(EpisodeState, 0))
    working: Counter[EpisodeState] = Counter()
    scored: dict[int, tuple[int, float]] = {}
    tokens_sampled = 0
    for row in conn.execute(
        text(
            """
            SELECT state, claim_token IS NOT NULL AS claimed, version_min, eval_version IS NULL AS trains,
                   count(*) AS num, sum(num_sampled) AS tokens, sum(greatest(least(reward, 1e6), -1e6)) AS rewards
              FROM episode WHERE run_id = :run_id GROUP BY 1, 2, 3, 4 ORDER BY 3
            """
        ),
        {"run_id": run_id},
    ):
        state = EpisodeState(row.state)
        episodes[state] += row.num
        working[state] += row.num if row.claimed else 0
        tokens_sampled += row.tokens
        if state is EpisodeState.SCORED and row.version_min is not None and row.trains:
            scored[row.version_min] = (row.num, row.rewards / row.num)
    lags = _lags(conn, run_id)
    return Snapshot(
        state=_state(conn, run_id),
        error=runs.error_of(conn, run_id),
        pause_reason=runs.pause_reason_of(conn, run_id),
        step_trouble=step_troubles.find(conn, run_id),
        engine_trouble=engines.trouble(conn, run_id),
        stages=_stages(episodes, working),
        episodes=episodes,
        groups=_groups(conn, run_id),
        version_newest=_newest_version(conn, run_id),
        version_live=engines.live_version(conn, run_id),
        lag_last=lags[-1] if lags else None,
        lag_max=max(lags, default=None),
        tokens_sampled=tokens_sampled,
        rewards=tuple(
            VersionReward(version=version, episodes=num, mean_reward=mean) for version, (num, mean) in scored.items()
        ),
        last_failure=_last_failure(conn, run_id),
        evaluations=evaluations.latest(conn, run_id),
    )


def _last_failure(conn: Connection, run_id: int) -> EpisodeFailure | None:
    """From the histories of the few episodes in trouble that moved last; scored ones are over their trouble."""
    row = conn.execute(
        text(
            """
            WITH troubled AS (
                SELECT id, state FROM episode
                 WHERE run_id = :run_id AND state IN ('NEW', 'READY', 'SAMPLED', 'FAILED') AND failures > 0
                 ORDER BY coalesce(finished_at, enqueued_at) DESC LIMIT :looked_at
            )
            SELECT v.episode_id, v.why FROM troubled e JOIN episode_event v ON v.episode_id = e.id
             WHERE split_part(v.why, ':', 1) = ANY(CAST(:kinds AS text[]))
               AND (e.state = 'FAILED' OR split_part(v.why, ':', 1) = :handler_failed)
             ORDER BY v.id DESC LIMIT 1
            """
        ),
        {
            "run_id": run_id,
            "looked_at": TROUBLED_LOOKED_AT,
            "kinds": sorted(set(Outcome) - AGENT_OUTCOMES),
            "handler_failed": Outcome.HANDLER_FAILED,
        },
    ).first()
    return None if row is None else EpisodeFailure(**row._mapping)


def _stages(episodes: Mapping[EpisodeState, int], working: Mapping[EpisodeState, int]) -> dict[Stage, StageCounts]:
    way = (
        (Stage.INIT, EpisodeState.NEW),
        (Stage.RUN, EpisodeState.READY),
        (Stage.EVAL, EpisodeState.SAMPLED),
        (None, EpisodeState.SCORED),
    )
    return {
        stage: StageCounts(
            waiting=episodes[takes] - working[takes],
            working=working[takes],
            done=sum(episodes[later] for _, later in way[position + 1 :]),
        )
        for position, (stage, takes) in enumerate(way)
        if stage is not None
    }


def _state(conn: Connection, run_id: int) -> RunState:
    return RunState(conn.execute(text("SELECT state FROM run WHERE id = :id"), {"id": run_id}).scalar_one())


def _groups(conn: Connection, run_id: int) -> dict[GroupState, int]:
    rows = conn.execute(
        text("SELECT state, count(*) AS num FROM episode_group WHERE run_id = :run_id GROUP BY state"),
        {"run_id": run_id},
    )
    return dict.fromkeys(GroupState, 0) | {GroupState(row.state): row.num for row in rows}


def groups_dropped(conn: Connection, run_id: int) -> dict[DropReason, int]:
    """Dropped groups by reason, the most frequent first."""
    rows = conn.execute(
        text(
            """
            SELECT drop_reason, count(*) AS num FROM episode_group
             WHERE run_id = :run_id AND state = 'DROPPED' GROUP BY drop_reason ORDER BY num DESC, drop_reason
            """
        ),
        {"run_id": run_id},
    )
    return {DropReason(row.drop_reason): row.num for row in rows}


def _newest_version(conn: Connection, run_id: int) -> int | None:
    newest: int | None = conn.execute(
        text("SELECT max(number) FROM policy_version WHERE run_id = :run_id"), {"run_id": run_id}
    ).scalar_one()
    return newest


def _lags(conn: Connection, run_id: int) -> list[int]:
    """The largest staleness of each finished step, in order, as the trainer noted it; the summary counts anew."""
    rows = conn.execute(
        text(
            """
            SELECT CAST(CAST(metrics ->> 'lag_max' AS float8) AS int) AS lag FROM train_step
             WHERE run_id = :run_id AND state = 'DONE' AND metrics ? 'lag_max' ORDER BY version_in
            """
        ),
        {"run_id": run_id},
    )
    return [row.lag for row in rows]


def newest_runs(conn: Connection, *, limit: int) -> list[Run]:
    """The runs of the database, newest first."""
    names = conn.execute(text("SELECT name FROM run ORDER BY id DESC LIMIT :limit"), {"limit": limit}).scalars().all()
    return [run for name in names if (run := runs.find(conn, name)) is not None]
