"""Waits for the groups of the next training step and reads them, from the database to the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from common.db import runs, standstill, step_troubles, steps
from common.db.runs import Run
from common.db.session import Database
from common.db.steps import ScoredGroup, Step
from common.episode import RunState
from common.errors import DatabaseUnavailable
from trainer.failures import AWAY_POLL_S, noting_failures

logger = logging.getLogger(__name__)

POLL_S = 0.1
LOOK_UP_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """A training step with its groups."""

    step: Step
    groups: tuple[ScoredGroup, ...]
    wait_s: float
    """How long the trainer waited for the groups."""


def wait_for_work(
    database: Database,
    run: Run,
    *,
    version: int,
    stop: threading.Event,
    look_up: Callable[[], None],
    even: bool = False,
) -> Work | None:
    """The step that trains `version`: one left OPEN by an earlier process, else as soon as groups are complete.

    Waits for complete groups, without end as long as the run goes on; wakes at every poll, on `stop` and when the run
    is over. Returns None in the last two cases. `look_up` is called now and then: why does nothing come? As often a run
    whose groups are all dropped for failed episodes is paused (train.max_dropped_groups), and then waited for.
    `even` = only groups of exactly rollout.group_size rows; others are dropped and replaced.
    """
    started = reported = time.monotonic()
    while not stop.is_set():
        try:
            step = _open_or_take(database, run, version=version, even=even)
            if step is not None:
                wait_s = time.monotonic() - started
                with noting_failures(database, step), database.begin() as conn:
                    return Work(step=step, groups=tuple(steps.load_groups(conn, step.id)), wait_s=wait_s)
            if _is_over(database, run):
                return None
            if time.monotonic() - reported > LOOK_UP_EVERY_S:
                reported = time.monotonic()
                look_up()
                _pause_if_still(database, run, version=version)
                waited_s = reported - started
                logger.info("still waiting for groups run=%d version=%d wait_s=%.0f", run.id, version, waited_s)
            stop.wait(POLL_S)
        except DatabaseUnavailable as error:
            # A restart would cost seconds and the optimizer's memory; a step that was taken is found OPEN again.
            logger.warning("database away run=%d version=%d: %s", run.id, version, error)
            stop.wait(AWAY_POLL_S)
    return None


def _open_or_take(database: Database, run: Run, *, version: int, even: bool) -> Step | None:
    train = run.config.train
    with database.begin() as conn:
        left_open = steps.open_step(conn, run.id)
        if left_open is not None:
            assert left_open.version_in == version, f"step {left_open} is open, but version {version} is the newest"
            replays = step_troubles.count_replay(conn, left_open)
            logger.info(
                "replaying open step run=%d step=%d version=%d replays=%d", run.id, left_open.id, version, replays
            )
            return left_open
        take = steps.take_groups(
            conn,
            run.id,
            version_in=version,
            num_groups=train.groups_per_step,
            max_staleness=train.max_staleness,
            max_refills=train.max_refills,
            pass_k=train.pass_k,
            wait_for_late=train.late_groups == "wait",
            even_rows=run.config.rollout.group_size if even else None,
        )
    for reason, count in take.dropped.items():
        logger.warning("dropped groups run=%d version=%d reason=%s count=%d", run.id, version, reason, count)
    if take.num_zero_variance:
        logger.warning(
            "training groups without variance run=%d version=%d count=%d: train.max_refills_per_step = %d are dropped",
            run.id,
            version,
            take.num_zero_variance,
            train.max_refills,
        )
    return take.step


def _pause_if_still(database: Database, run: Run, *, version: int) -> None:
    with database.begin() as conn:
        reason = standstill.pause_if_still(conn, run.id, version=version, max_dropped=run.config.train.max_dropped)
    if reason is not None:
        logger.warning(
            "paused run=%d version=%d: %s; mend the cause, then `rollmill run resume %s`",
            run.id,
            version,
            reason,
            run.name,
        )


def _is_over(database: Database, run: Run) -> bool:
    with database.begin() as conn:
        now = runs.find(conn, run.name)
    return now is None or now.state in (RunState.FINISHED, RunState.STOPPED)
