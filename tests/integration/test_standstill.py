"""A run whose groups all come to nothing is paused with the reason, and goes on when somebody resumes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from common.db import cancel, retries, run_control, runs, standstill, steps
from common.db.snapshot import take_snapshot
from common.episode import RunState
from common.outcomes import Outcome
from tests.integration.conftest import Answer
from tests.integration.world import World
from trainer.source import wait_for_work

REASON = (
    "2 groups were dropped while version 0 was waited for; 3 of their 4 failed episodes: handler_failed "
    "(e.g. episode 3: run of my:Tool: ZeroDivisionError: division by zero)"
)


def fail(world: World, *outcomes: Outcome, version: int = 0) -> None:
    """Groups of two whose episodes all fail, with these outcomes in order, and that are dropped."""
    for wakeup, outcome in zip(world.feed(len(outcomes) // 2), outcomes, strict=True):
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            retries.retry(
                conn,
                claim,
                outcome=outcome,
                detail="run of my:Tool: ZeroDivisionError:\n division by zero",
                afresh=True,
                max_attempts=1,
            )
    drop(world, version)


def drop(world: World, version: int = 0) -> None:
    with world.database.begin() as conn:
        steps.take_groups(conn, world.run.id, version_in=version, num_groups=2, max_staleness=1)


def pause_if_still(world: World, *, version: int = 0, max_dropped: int = 2) -> str | None:
    with world.database.begin() as conn:
        return standstill.pause_if_still(conn, world.run.id, version=version, max_dropped=max_dropped)


def state_of(world: World) -> tuple[RunState, str | None]:
    with world.database.begin() as conn:
        now = take_snapshot(conn, world.run.id)
    return now.state, now.pause_reason


def make_older(world: World, group_id: int, *, seconds: float) -> None:
    with world.database.begin() as conn:
        conn.execute(
            text("UPDATE episode_group SET completed_at = completed_at - :s * interval '1 second' WHERE id = :id"),
            {"s": seconds, "id": group_id},
        )


def test_a_run_whose_handler_always_raises_is_paused_with_the_reason(world: World) -> None:
    fail(world, *[Outcome.HANDLER_FAILED] * 3, Outcome.SANDBOX_FAILED)
    assert pause_if_still(world, max_dropped=3) is None
    assert pause_if_still(world, version=1) is None
    assert state_of(world) == (RunState.ACTIVE, None)
    assert pause_if_still(world) == REASON
    assert state_of(world) == (RunState.PAUSED, REASON)
    assert pause_if_still(world) is None, "it is paused already"


def test_a_run_that_was_resumed_counts_anew(world: World) -> None:
    in_flight = world.feed()
    fail(world, *[Outcome.HANDLER_FAILED] * 4)
    assert pause_if_still(world) is not None
    with world.database.begin() as conn:
        run_control.resume(conn, world.run.name)
    assert state_of(world) == (RunState.ACTIVE, None)
    for wakeup in in_flight:
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            retries.retry(conn, claim, outcome=Outcome.HANDLER_FAILED, detail="", afresh=True, max_attempts=1)
    fail(world, *[Outcome.HANDLER_FAILED] * 2)
    assert pause_if_still(world) is None, "two groups are of the time before"
    fail(world, *[Outcome.HANDLER_FAILED] * 2)
    assert pause_if_still(world) is not None


def test_a_run_that_somebody_paused_by_hand_has_no_reason(world: World) -> None:
    fail(world, *[Outcome.HANDLER_FAILED] * 4)
    assert pause_if_still(world) is not None
    with world.database.begin() as conn:
        run_control.resume(conn, world.run.name)
        run_control.pause(conn, world.run.name)
    assert state_of(world) == (RunState.PAUSED, None)


def test_an_outage_of_infrastructure_is_given_ten_minutes(world: World) -> None:
    fail(world, *[Outcome.SANDBOX_FAILED] * 3, Outcome.HANDLER_FAILED)
    make_older(world, 1, seconds=590)
    assert pause_if_still(world) is None
    make_older(world, 1, seconds=20)
    reason = pause_if_still(world)
    assert reason is not None
    assert "3 of their 4 failed episodes: sandbox_failed" in reason


def test_groups_that_were_cancelled_are_nobodys_failure(world: World) -> None:
    for wakeup in world.feed(2):
        with world.database.begin() as conn:
            cancel.cancel_episodes(conn, [wakeup.episode_id], why="by hand")
    drop(world)
    assert pause_if_still(world, max_dropped=1) is None


def test_the_trainer_pauses_the_run_warns_once_and_goes_on_when_it_is_resumed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.database.begin() as conn:
        train = world.run.config.train.model_copy(update={"max_dropped_groups": 2})
        world.run = runs.open_run(conn, world.run.config.model_copy(update={"train": train}))
    fail(world, *[Outcome.HANDLER_FAILED] * 3, Outcome.SANDBOX_FAILED)
    looked_up, stop = threading.Semaphore(0), threading.Event()
    with ThreadPoolExecutor(1) as executor, caplog.at_level(logging.INFO):
        waiting = executor.submit(
            wait_for_work, world.database, world.run, version=0, stop=stop, look_up=looked_up.release
        )
        try:
            # At the third look-up the second is over.
            for _ in range(3):
                assert looked_up.acquire(timeout=60)
            assert state_of(world) == (RunState.PAUSED, REASON)
            warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert warned == [
                f"paused run={world.run.id} version=0: {REASON}; mend the cause, then `rollmill run resume run-a`"
            ]
            with world.database.begin() as conn:
                run_control.resume(conn, world.run.name)
            for number, wakeup in enumerate(world.feed(2)):
                world.finish(wakeup, reward=float(number % 2))
            work = waiting.result(timeout=60)
        finally:
            stop.set()
    assert work is not None
    assert len(work.groups) == 2


def test_the_commands_show_why_the_run_is_paused(world: World, rollmill: Callable[..., Answer]) -> None:
    fail(world, *[Outcome.HANDLER_FAILED] * 3, Outcome.SANDBOX_FAILED)
    assert pause_if_still(world) == REASON
    for command in (("status",), ("run", "list")):
        code, said = rollmill(*command)
        assert code == 0
        assert f"run-a: paused: {REASON}" in " ".join(said.split())
    assert rollmill("run", "resume", "run-a") == (0, "run run-a is active again\n")
    assert "paused" not in rollmill("status")[1]
