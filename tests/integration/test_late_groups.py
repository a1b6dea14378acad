"""Groups that take longer than the staleness bound: waited for, or given up as soon as they are lost."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import text

from common.db import late, steps, versions
from common.db.snapshot import take_snapshot
from common.episode import DropReason, EpisodeState
from common.settings import Settings
from common.weights import Published
from tests.integration.world import World
from workers.reaper import Reaper
from workers.sandbox import open_backend


def publish(world: World, number: int) -> None:
    with world.database.begin() as conn:
        versions.publish(conn, world.run.id, number, Published(location="weights", manifest_sha256=str(number) * 64))


def take(world: World, version_in: int, *, wait_for_late: bool = True) -> steps.Take:
    """One group, at most one version old, in a transaction that is undone."""
    with world.database.engine.connect() as conn:
        return steps.take_groups(
            conn, world.run.id, version_in=version_in, num_groups=1, max_staleness=1, wait_for_late=wait_for_late
        )


def test_the_step_that_would_make_an_open_group_too_old_waits_for_it(world: World):
    publish(world, 0)
    first, second, *slow = world.feed(2)
    world.finish(first)
    world.finish(second)
    assert take(world, 0).step is not None
    publish(world, 1)
    assert take(world, 1).step is None
    assert take(world, 1, wait_for_late=False).step is not None
    for wakeup in slow:
        world.finish(wakeup)
    assert take(world, 1).step is not None


def test_a_group_that_was_made_under_a_newer_version_is_not_waited_for(world: World):
    publish(world, 0)
    done = world.feed(1)
    publish(world, 1)
    world.feed(1)
    for wakeup in done:
        world.finish(wakeup, version=1)
    assert take(world, 1).step is not None
    assert take(world, 2).step is None


def test_a_group_that_an_engine_began_with_an_older_version_is_waited_for(world: World):
    publish(world, 0)
    done = world.feed(1)
    publish(world, 1)
    early, _ = world.feed(1)
    for wakeup in (*done, early):
        world.finish(wakeup, version=0)
    assert take(world, 0).step is not None
    assert take(world, 1).step is None


def test_the_rest_of_a_group_that_is_too_old_is_cancelled(world: World, tmp_path: Path):
    done, *_ = world.feed(1)
    world.finish(done, version=1)
    for number in range(4):
        publish(world, number)
        with world.database.begin() as conn:
            cancelled = late.cancel_doomed(conn)
        # Version 1 may still be trained by the step from version 2.
        assert (cancelled is not None) == (number == 3)
    Reaper(world.database, Settings(), open_backend(Settings(data_dir=tmp_path)), lambda wakeups: None).round()
    with world.database.begin() as conn:
        taken = steps.take_groups(conn, world.run.id, version_in=3, num_groups=1, max_staleness=1)
    assert (taken.step, dict(taken.dropped)) == (None, {DropReason.STALE: 1})


def test_the_reaper_leaves_groups_that_may_still_be_trained(world: World, tmp_path: Path):
    done, other, fresh, _ = world.feed(2)
    world.finish(done, version=0)
    world.finish(fresh, version=2)
    world.sample(world.prepare(other), version=0)
    for number in range(3):
        publish(world, number)
    Reaper(world.database, Settings(), open_backend(Settings(data_dir=tmp_path)), lambda wakeups: None).round()
    with world.database.begin() as conn:
        states = take_snapshot(conn, world.run.id).episodes
    assert [states[state] for state in (EpisodeState.SCORED, EpisodeState.CANCELLED, EpisodeState.NEW)] == [2, 1, 1]


def test_a_group_of_an_evaluation_is_not_waited_for(world: World):
    publish(world, 0)
    first, second, *held_out = world.feed(2)
    world.finish(first)
    world.finish(second)
    with world.database.begin() as conn:
        conn.execute(
            text("UPDATE episode_group SET eval_version = 0 WHERE id = (SELECT group_id FROM episode WHERE id = :id)"),
            {"id": held_out[0].episode_id},
        )
    publish(world, 1)
    assert take(world, 1).step is not None
