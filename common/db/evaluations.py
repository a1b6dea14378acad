"""Evaluation points: versions of a run that are played on its held-out tasks, and how they did.

A point is made with its version, in one transaction. While it is open, engines that have reached the version stay
there (`versions.wanted`): so every token of its episodes is of that version, whatever the trainer publishes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from sqlalchemy import Connection, text

from common.db import groups, tasks
from common.db.episodes import Wakeup
from common.db.runs import Run
from common.episode import GroupState
from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class OpenPoint:
    """A version whose evaluation is not over."""

    version: int
    num_groups: int
    """Groups that it has so far: one for each of the first so many held-out tasks."""
    num_in_flight: int
    """Episodes of it that are not final."""
    is_served: bool
    """An engine that takes new work serves the version."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a version did: a row of the view `evaluation`."""

    version: int
    finished: bool
    tasks: int
    episodes: int
    """All that were made; each is scored, failed, mixed, cancelled, or still under way."""
    scored: int
    """Those that the figures are of."""
    mean_reward: float | None
    """Mean over tasks of the mean over a task's episodes; None = none is scored."""
    standard_error: float | None
    """Of the mean, from what varies between tasks; None = fewer than two of them."""
    pass_at: tuple[float, ...]
    """pass@1, pass@2 … pass@samples_per_task, as far as tasks have so many scored episodes."""
    failed: int
    """Infrastructure failed under them: they have no reward, and none of 0 either."""
    mixed: int
    """Scored, but with tokens of another version: counted apart."""
    cancelled: int
    error: str | None
    """Why it was given up; None = it was not."""

    @property
    def under_way(self) -> int:
        """Episodes that may still be scored."""
        return self.episodes - self.scored - self.failed - self.mixed - self.cancelled


def open_if_due(conn: Connection, run_id: int, version: int) -> None:
    """Make the version's point if the run's [eval] wants it: every n-th version and the last. In its transaction."""
    conn.execute(
        text(
            """
            INSERT INTO evaluation_point (run_id, version)
            SELECT id, :version FROM run
             WHERE id = :run_id AND jsonb_typeof(config -> 'eval') = 'object'
               AND (:version % CAST(config #>> '{eval,every_versions}' AS int) = 0
                    OR :version = CAST(config #>> '{train,num_versions}' AS int))
            ON CONFLICT (run_id, version) DO NOTHING
            """
        ),
        {"run_id": run_id, "version": version},
    )


def oldest_open(conn: Connection, run_id: int) -> OpenPoint | None:
    """The point that is next; the others wait for it. None = none is open."""
    row = conn.execute(
        text(
            """
            SELECT p.version,
                   (SELECT count(*) FROM episode_group
                     WHERE run_id = p.run_id AND eval_version = p.version) AS num_groups,
                   (SELECT coalesce(sum(size - num_final), 0) FROM episode_group
                     WHERE run_id = p.run_id AND eval_version = p.version AND state = 'OPEN') AS num_in_flight,
                   EXISTS (SELECT FROM engine
                            WHERE run_id = p.run_id AND version = p.version AND state = 'SERVING') AS is_served
              FROM evaluation_point p
             WHERE run_id = :run_id AND finished_at IS NULL ORDER BY version LIMIT 1
            """
        ),
        {"run_id": run_id},
    ).first()
    return OpenPoint(**row._mapping) if row else None


def advance(conn: Connection, run: Run, *, task_ids: Sequence[int]) -> tuple[OpenPoint | None, list[Wakeup]]:
    """Make the next groups of the run's oldest open point, or close it; the messages to send after the commit.

    With the run's row locked. One group for each held-out task, in their order, so that their number says how far it
    is. Returns the point, if it is still open.
    """
    assert run.config.eval is not None, f"run {run.name} is not evaluated"
    _settle_groups(conn, run.id)
    point = oldest_open(conn, run.id)
    if point is None:
        return None, []
    if point.num_groups == len(task_ids) and point.num_in_flight == 0:
        close(conn, run.id, point.version)
        return None, []
    if not point.is_served:
        return point, []
    size = run.config.eval.samples_per_task
    room = (run.config.eval.max_episodes_in_flight - point.num_in_flight) // size
    chosen = list(task_ids[point.num_groups : point.num_groups + room])
    return point, groups.create(conn, run_id=run.id, task_ids=chosen, size=size, eval_version=point.version)


def store_tasks(
    conn: Connection, run: Run, *, dataset: str, given: Sequence[tuple[str, dict[str, JsonValue]]]
) -> list[int]:
    """Ids of the run's held-out tasks, in order. Raises SetupError when it was evaluated on others before."""
    before = conn.execute(
        text(
            """
            SELECT t.dataset FROM episode_group g JOIN task t ON t.id = g.task_id
             WHERE g.run_id = :run_id AND g.eval_version IS NOT NULL LIMIT 1
            """
        ),
        {"run_id": run.id},
    ).scalar()
    if before not in (None, dataset):
        raise SetupError(
            f"the held-out tasks of run {run.name} are not those that it was evaluated on before: "
            "put them back, or start a run of another name"
        )
    tasks.load(conn, dataset=dataset, handler=run.config.handler, payloads=given)
    return tasks.ids(conn, dataset)


def _settle_groups(conn: Connection, run_id: int) -> None:
    """Complete groups of evaluations are over: nobody takes them."""
    conn.execute(
        text(
            """
            UPDATE episode_group SET state = :to
             WHERE run_id = :run_id AND state = 'COMPLETE' AND eval_version IS NOT NULL
            """
        ),
        {"run_id": run_id, "to": GroupState.EVALUATED},
    )


def close(conn: Connection, run_id: int, version: int, *, error: str | None = None) -> None:
    """The point is over: the engines go on to newer versions. `error` says why it was given up."""
    conn.execute(
        text(
            """
            UPDATE evaluation_point SET finished_at = clock_timestamp(), error = :error
             WHERE run_id = :run_id AND version = :version AND finished_at IS NULL
            """
        ),
        {"run_id": run_id, "version": version, "error": error},
    )


def close_all(conn: Connection, run_id: int, *, error: str) -> None:
    """Give up what is open, as the run ends."""
    conn.execute(
        text(
            """
            UPDATE evaluation_point SET finished_at = clock_timestamp(), error = :error
             WHERE run_id = :run_id AND finished_at IS NULL
            """
        ),
        {"run_id": run_id, "error": error},
    )


def is_pending(conn: Connection, run_id: int) -> bool:
    """Whether a point is open, begun or not, or an episode of one still on its way."""
    pending: bool = conn.execute(
        text(
            """
            SELECT EXISTS (SELECT FROM evaluation_point WHERE run_id = :run_id AND finished_at IS NULL)
                OR EXISTS (SELECT FROM episode_group
                            WHERE run_id = :run_id AND eval_version IS NOT NULL AND state IN ('OPEN', 'COMPLETE'))
            """
        ),
        {"run_id": run_id},
    ).scalar_one()
    return pending


def results(conn: Connection, run: str, *, since: int = 0) -> tuple[Evaluation, ...]:
    """How the run's versions did, from version `since` on, in order."""
    rows = conn.execute(
        text(
            """
            SELECT version, finished, tasks, episodes, scored, mean_reward, standard_error,
                   coalesce(pass_at, '{}') AS pass_at, failed, mixed, cancelled, error
              FROM evaluation WHERE run = :run AND version >= :since ORDER BY version
            """
        ),
        {"run": run, "since": since},
    )
    return tuple(Evaluation(**{**row._mapping, "pass_at": tuple(row.pass_at)}) for row in rows)


def latest(conn: Connection, run_id: int) -> tuple[Evaluation, ...]:
    """The last evaluation that is over, and those that are not; cheap where there is none."""
    row = conn.execute(
        text(
            """
            SELECT r.name, coalesce(max(p.version) FILTER (WHERE p.finished_at IS NOT NULL), 0) AS since
              FROM evaluation_point p JOIN run r ON r.id = p.run_id WHERE p.run_id = :run_id GROUP BY r.name
            """
        ),
        {"run_id": run_id},
    ).first()
    return results(conn, row.name, since=row.since) if row else ()
