"""Pausing, resuming and stopping a run: each is compare-and-set on its state, and says what it may not do."""

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
    _move(conn, name, RunState.PAUSED)


def resume(conn: Connection, name: str) -> None:
    """Let a paused run go on where it stood."""
    _move(conn, name, RunState.ACTIVE)


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
