"""Pausing, resuming, stopping and extending a run: each is one transaction, and says what it may not do."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from common.db import evaluations, runs, steps
from common.db.cancel import Cancelled, cancel_run
from common.episode import RUN_MOVES, DropReason, RunState
from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """What stopping a run ended."""

    episodes: Cancelled
    num_groups_dropped: int
    """Groups that were not trained yet, those of an open training step among them."""


def pause(conn: Connection, name: str) -> None:
    """Make no new episodes; those in flight finish, and the trainer takes their groups."""
    runs.note_pause(conn, _move(conn, name, RunState.PAUSED), reason=None)


def resume(conn: Connection, name: str) -> None:
    """Let a paused run go on where it stood; groups that were dropped before do not count against it any more."""
    runs.note_resume(conn, _move(conn, name, RunState.ACTIVE))


def extend(conn: Connection, name: str, *, num_versions: int) -> int:
    """Let the run be trained up to this version, also when it is finished; returns the number up to now.

    The feeder follows at once. A trainer that runs keeps the number that it was started with, and does not finish the
    run. Raises SetupError for a run that is stopped or trains nothing, and for a number that is not more.
    """
    run = runs.require(conn, name, lock=True)
    before = run.config.train.num_versions
    if run.state is RunState.STOPPED:
        raise SetupError(f"run {name} is stopped, and stays so: give a new one another name")
    if before == 0:
        raise SetupError(f"run {name} trains nothing: it is an evaluation, and cannot be extended")
    if num_versions <= before:
        raise SetupError(f"run {name} has {before} versions already: --versions {num_versions} is not more")
    runs.extend(conn, run.id, num_versions=num_versions)
    return before


def stop(conn: Connection, name: str, *, why: str) -> Stopped:
    """End the run for good: cancel its episodes, drop its groups, open step and evaluations, in one transaction.

    A feeder that makes groups at this moment is waited for, and they are cancelled too; after it there are no new
    ones. A trainer in the middle of a step finds it dropped and ends.
    """
    run_id = _move(conn, name, RunState.STOPPED)
    steps.drop_open_step(conn, run_id)
    evaluations.close_all(conn, run_id, error=DropReason.STOPPED)
    cancelled = cancel_run(conn, run_id, why=why)
    return Stopped(episodes=cancelled, num_groups_dropped=steps.drop_groups(conn, run_id))


def _move(conn: Connection, name: str, to: RunState) -> int:
    run = runs.require(conn, name)
    if not runs.move(conn, run.id, to):
        state = runs.require(conn, name).state
        sources = " or ".join(source.lower() for source, targets in RUN_MOVES.items() if to in targets)
        raise SetupError(f"run {name} is {state.lower()}: only one that is {sources} can become {to.lower()}")
    return run.id
