"""Training steps: taking groups under the staleness bound, and marking a step done with its version, at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db import turns, versions
from common.db.late import is_any_late
from common.episode import DropReason, ScoredEpisode
from common.errors import SetupError
from common.outcomes import AGENT_OUTCOMES
from common.variance import is_even
from common.weights import Published


@dataclass(frozen=True, kw_only=True)
class Step:
    """A training step that is OPEN: its groups are TAKEN."""

    id: int
    run_id: int
    version_in: int


@dataclass(frozen=True, kw_only=True)
class Take:
    """What taking groups gave."""

    step: Step | None
    """None = not enough complete groups yet."""
    dropped: Counter[DropReason]
    """Groups that were dropped on the way."""
    num_zero_variance: int = 0
    """Groups of the step without variance although such groups are to be replaced: too many were before."""


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """A group as the trainer reads it: its SCORED episodes only."""

    group_id: int
    episodes: tuple[ScoredEpisode, ...]


@dataclass(frozen=True, kw_only=True)
class TrainedEpisode:
    """An episode that went into a loss."""

    episode_id: int
    digest: bytes
    """Over its turns, recomputed from the arrays that entered the loss."""
    advantage: float
    num_tokens: int


def open_step(conn: Connection, run_id: int) -> Step | None:
    """The step that a trainer left unfinished; None = none."""
    row = conn.execute(
        text("SELECT id, run_id, version_in FROM train_step WHERE run_id = :run_id AND state = 'OPEN'"),
        {"run_id": run_id},
    ).first()
    return Step(id=row.id, run_id=row.run_id, version_in=row.version_in) if row else None


def take_groups(
    conn: Connection,
    run_id: int,
    *,
    version_in: int,
    num_groups: int,
    max_staleness: int,
    max_refills: int = 0,
    pass_k: int | None = None,
    wait_for_late: bool = False,
    even_rows: int | None = None,
) -> Take:
    """Open a step with the oldest `num_groups` complete groups; fewer are left where they are.

    Groups whose oldest token is more than `max_staleness` versions behind `version_in`, or that have no baseline,
    are dropped and counted; so are up to `max_refills` groups for each version that have no variance by
    common/variance.py and `pass_k`, and then the feeder makes as many new ones. It is the raw reward that counts. Of a
    run that is over, nothing is taken. With `wait_for_late` nothing is taken either while a group is open that the step
    would make too old. With `even_rows` groups that do not give exactly so many rows are dropped, too.
    """
    # Against a stop, which drops all groups: it waits until the step is committed, or we see that it was first.
    if not conn.execute(
        text("SELECT id FROM run WHERE id = :run_id AND state IN ('ACTIVE', 'PAUSED') FOR SHARE"), {"run_id": run_id}
    ).first():
        return Take(step=None, dropped=Counter())
    # Before we look what is complete: a late group that completes in between would be left out, and then too old.
    held_up = wait_for_late and is_any_late(conn, run_id, oldest=version_in - max_staleness)
    complete = _complete(conn, run_id)
    # Only what was judged may be taken: a group that completes in between waits for the next call.
    oldest = version_in - max_staleness
    verdicts = _judge(conn, complete, oldest=oldest, even_rows=even_rows, pass_k=pass_k)
    judged = {verdict.group_id: verdict for verdict in verdicts}
    left = max_refills and max_refills - num_refilled(conn, run_id, version_in=version_in)
    reasons = _reasons(judged.values(), num_refills=left)
    _drop(conn, reasons, version_in=version_in)
    dropped = Counter(reasons.values())
    ids = [group_id for group_id in complete if group_id not in reasons][:num_groups]
    if len(ids) < num_groups or held_up:
        return Take(step=None, dropped=dropped)
    step_id = conn.execute(
        text("INSERT INTO train_step (run_id, version_in) VALUES (:run_id, :version_in) RETURNING id"),
        {"run_id": run_id, "version_in": version_in},
    ).scalar_one()
    conn.execute(
        text("UPDATE episode_group SET state = 'TAKEN', step_id = :step_id WHERE id = ANY(:ids)"),
        {"step_id": step_id, "ids": ids},
    )
    return Take(
        step=Step(id=step_id, run_id=run_id, version_in=version_in),
        dropped=dropped,
        num_zero_variance=sum(judged[group_id].even for group_id in ids) if max_refills else 0,
    )


def _complete(conn: Connection, run_id: int) -> list[int]:
    """Ids of the complete groups, the oldest first, locked; without those that somebody else has locked."""
    rows = conn.execute(
        text(
            """
            SELECT id FROM episode_group WHERE run_id = :run_id AND state = 'COMPLETE' AND eval_version IS NULL
             ORDER BY id FOR UPDATE SKIP LOCKED
            """
        ),
        {"run_id": run_id},
    )
    return [row.id for row in rows]


def num_refilled(conn: Connection, run_id: int, *, version_in: int) -> int:
    """Groups that were dropped for want of variance since `version_in` was published."""
    count: int = conn.execute(
        text(
            """
            SELECT count(*) FROM episode_group
             WHERE run_id = :run_id AND drop_reason = 'zero_variance' AND dropped_version = :version_in
            """
        ),
        {"run_id": run_id, "version_in": version_in},
    ).scalar_one()
    return count


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """What speaks against training a group."""

    group_id: int
    stale: bool
    too_few: bool
    uneven: bool
    """It gives another number of rows than its trainer can take."""
    even: bool
    """The rewards that would enter the baseline tell no episodes apart."""


def _judge(
    conn: Connection, group_ids: list[int], *, oldest: int, even_rows: int | None, pass_k: int | None
) -> list[_Judged]:
    rows = conn.execute(
        text(
            """
            SELECT group_id, coalesce(min(version_min) FILTER (WHERE state = 'SCORED') < :oldest, false) AS stale,
                   count(*) FILTER (WHERE state = 'SCORED' AND outcome = ANY(:agent)) < 2 AS too_few,
                   CAST(:even_rows AS int) IS NOT NULL
                   AND coalesce(sum(num_rows) FILTER (WHERE state = 'SCORED' AND outcome = ANY(:agent)), 0)
                       <> CAST(:even_rows AS int) AS uneven,
                   coalesce(array_agg(reward) FILTER (WHERE state = 'SCORED' AND outcome = ANY(:agent)), '{}')
                       AS rewards
              FROM episode
              LEFT JOIN LATERAL (SELECT count(DISTINCT sample) AS num_rows FROM turn
                                  WHERE episode_id = episode.id AND CAST(:even_rows AS int) IS NOT NULL) r ON true
             WHERE group_id = ANY(:ids) GROUP BY group_id ORDER BY group_id
            """
        ),
        {"ids": group_ids, "oldest": oldest, "agent": sorted(AGENT_OUTCOMES), "even_rows": even_rows},
    )
    return [
        _Judged(
            group_id=row.group_id,
            stale=row.stale,
            too_few=row.too_few,
            uneven=row.uneven,
            even=is_even(row.rewards, pass_k=pass_k),
        )
        for row in rows
    ]


def _reasons(judged: Iterable[_Judged], *, num_refills: int) -> dict[int, DropReason]:
    """One reason for each group that is dropped: one that two reasons speak against is replaced once, and counts once.

    Of the groups without variance the oldest `num_refills` are dropped.
    """
    reasons: dict[int, DropReason] = {}
    for group in judged:
        if group.stale:
            reasons[group.group_id] = DropReason.STALE
        elif group.too_few:
            reasons[group.group_id] = DropReason.TOO_FEW
        elif group.uneven:
            reasons[group.group_id] = DropReason.UNEVEN
        elif group.even and num_refills > 0:
            reasons[group.group_id] = DropReason.ZERO_VARIANCE
            num_refills -= 1
    return reasons


def _drop(conn: Connection, reasons: Mapping[int, DropReason], *, version_in: int) -> None:
    if reasons:
        conn.execute(
            text(
                """
                UPDATE episode_group g SET state = 'DROPPED', drop_reason = given.reason, dropped_version = :version_in
                  FROM unnest(CAST(:ids AS bigint[]), CAST(:reasons AS text[])) AS given (id, reason)
                 WHERE g.id = given.id
                """
            ),
            {"ids": list(reasons), "reasons": list(reasons.values()), "version_in": version_in},
        )


def load_groups(conn: Connection, step_id: int) -> list[ScoredGroup]:
    """The groups of a step with their scored episodes, in order."""
    by_group: dict[int, list[ScoredEpisode]] = {}
    for episode in turns.load_for_step(conn, step_id):
        by_group.setdefault(episode.group_id, []).append(episode)
    return [ScoredGroup(group_id=group_id, episodes=tuple(episodes)) for group_id, episodes in by_group.items()]


def is_done(conn: Connection, step: Step, published: Published) -> bool:
    """Whether the step is DONE with this very version: a commit whose answer was lost had arrived."""
    row = conn.execute(
        text(
            """
            SELECT v.manifest_sha256 FROM train_step s
              JOIN policy_version v ON v.run_id = s.run_id AND v.number = s.version_in + 1
             WHERE s.id = :id AND s.state = 'DONE' FOR SHARE OF s
            """
        ),
        {"id": step.id},
    ).first()
    return row is not None and row.manifest_sha256 == published.manifest_sha256


def is_open(conn: Connection, step: Step) -> bool:
    """Whether the step can still be finished; False = it was dropped with the run. Raises as `finish_step` does."""
    state = conn.execute(text("SELECT state FROM train_step WHERE id = :id"), {"id": step.id}).scalar_one()
    return _is_open(step, state)


def _is_open(step: Step, state: str) -> bool:
    if state not in ("OPEN", "DROPPED"):
        raise SetupError(
            f"step {step.id} of run {step.run_id} from version {step.version_in} is not open: another trainer has "
            "finished it. Start one trainer for a run"
        )
    return state == "OPEN"


def finish_step(
    conn: Connection,
    step: Step,
    *,
    published: Published,
    metrics: dict[str, float],
    trained: list[TrainedEpisode],
) -> bool:
    """Step DONE, groups TRAINED, version published, episodes accounted for: one transaction, all or nothing.

    False = nothing, because the run was stopped and the step dropped with it. Raises SetupError if the step is DONE:
    another trainer of the run has finished it.
    """
    # The step's row is locked before any group's, as in `drop_open_step`: the two cannot deadlock.
    state = conn.execute(text("SELECT state FROM train_step WHERE id = :id FOR UPDATE"), {"id": step.id}).scalar_one()
    if not _is_open(step, state):
        return False
    conn.execute(
        text(
            """
            WITH trained AS (
                UPDATE episode_group SET state = 'TRAINED' WHERE step_id = :id AND state = 'TAKEN' RETURNING id
            )
            UPDATE train_step SET state = 'DONE', metrics = CAST(:metrics AS jsonb), finished_at = clock_timestamp(),
                   num_groups = (SELECT count(*) FROM trained)
             WHERE id = :id
            """
        ),
        {"id": step.id, "metrics": json.dumps(metrics, allow_nan=False)},
    )
    _account(conn, step, trained)
    versions.publish(conn, step.run_id, step.version_in + 1, published)
    return True


def _account(conn: Connection, step: Step, trained: list[TrainedEpisode]) -> None:
    if not trained:
        return
    conn.execute(
        text(
            """
            INSERT INTO trained_episode (step_id, episode_id, digest, advantage, num_tokens)
            VALUES (:step_id, :episode_id, :digest, :advantage, :num_tokens)
            """
        ),
        [
            {
                "step_id": step.id,
                "episode_id": episode.episode_id,
                "digest": episode.digest,
                "advantage": episode.advantage,
                "num_tokens": episode.num_tokens,
            }
            for episode in trained
        ],
    )


def drop_open_step(conn: Connection, run_id: int) -> None:
    """Give up the open step of a run that is being stopped. Its groups are still TAKEN: `drop_groups` is next.

    The step's row is locked before any group's, as `finish_step` does.
    """
    conn.execute(
        text(
            """
            UPDATE train_step SET state = 'DROPPED', finished_at = clock_timestamp()
             WHERE run_id = :run_id AND state = 'OPEN'
            """
        ),
        {"run_id": run_id},
    )


def drop_groups(conn: Connection, run_id: int) -> int:
    """Drop every group of a stopped run that is not trained; returns how many. All its episodes must be final."""
    dropped = conn.execute(
        text(
            """
            UPDATE episode_group SET state = 'DROPPED', drop_reason = :reason
             WHERE run_id = :run_id AND state IN ('OPEN', 'COMPLETE', 'TAKEN') RETURNING id
            """
        ),
        {"run_id": run_id, "reason": DropReason.STOPPED},
    )
    return len(dropped.all())
