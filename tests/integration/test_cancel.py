"""Cancelling episodes, and pausing and stopping runs, against everybody who works on them at the same moment.

Over 400 lines: the orders of one race each, side by side, so that a missing one is seen.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, text

from common.config import RunConfig
from common.db import cancel, engines, episodes, groups, retries, run_control, runs, sandboxes, steps, turns
from common.db.cancel import Cancelled
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import DropReason, EpisodeState, RunState, Stage
from common.errors import LeaseLost, SetupError
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn
from workers.feeder import Feeder

DONE = Cancelled(num_cancelled=1, num_at_work=0, already_final=Counter())


def row(world: World, table: str, id: int) -> Any:
    with world.database.begin() as conn:
        return conn.execute(text(f"SELECT * FROM {table} WHERE id = :id"), {"id": id}).one()


def count(world: World, table: str, where: str) -> int:
    with world.database.begin() as conn:
        found: int = conn.execute(text(f"SELECT count(*) FROM {table} WHERE {where}")).scalar_one()
        return found


def cancel_one(world: World, wakeup: Wakeup) -> Cancelled:
    with world.database.begin() as conn:
        return cancel.cancel_episodes(conn, [wakeup.episode_id], why="by hand")


def stop(world: World) -> run_control.Stopped:
    with world.database.begin() as conn:
        return run_control.stop(conn, world.run.name, why="enough")


def state_of_run(world: World) -> RunState:
    with world.database.begin() as conn:
        return runs.require(conn, world.run.name).state


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def wait_until_blocked(database: Database) -> None:
    """Return when some statement waits for a lock."""
    deadline = time.monotonic() + 20
    while True:
        with database.begin() as conn:
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            if conn.execute(text(query)).scalar_one():
                return
        assert time.monotonic() < deadline, "nothing waits for a lock"
        time.sleep(0.01)


def test_an_episode_that_waits_is_cancelled_and_nobody_can_claim_it(world: World):
    wakeup = world.feed()[0]
    assert cancel_one(world, wakeup) == DONE
    assert world.claim(wakeup) is None
    stored = row(world, "episode", wakeup.episode_id)
    assert (stored.state, stored.outcome, stored.reward, stored.detail) == ("CANCELLED", None, None, "by hand")
    assert stored.finished_at is not None
    with world.database.begin() as conn:
        event = conn.execute(text("SELECT * FROM episode_event ORDER BY id DESC LIMIT 1")).one()
    assert (event.episode_id, event.from_state, event.to_state, event.why) == (
        wakeup.episode_id,
        "NEW",
        "CANCELLED",
        "by hand",
    )


def test_a_worker_whose_episode_is_cancelled_writes_nothing_more_and_its_turns_stay(world: World):
    ready = world.prepare(world.feed()[0])
    claim = world.must_claim(ready)
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))

    assert cancel_one(world, ready) == Cancelled(num_cancelled=1, num_at_work=1, already_final=Counter())

    with pytest.raises(LeaseLost), world.database.begin() as conn:
        turns.save(conn, claim, make_turn(1))
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        episodes.move(conn, claim, EpisodeState.SAMPLED, why="late", outcome=Outcome.FINISHED)
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.ENGINE_LOST, detail="late", afresh=True, max_attempts=5)
    with world.database.begin() as conn:
        assert episodes.renew(conn, [claim.token], lease_s=5) == set()
        assert retries.release(conn, [claim.token], why="shutting down") == []
        assert retries.reap(conn, max_attempts=5) == []
        assert turns.load(conn, ready.episode_id, 1) == [make_turn(0)]
        assert conn.execute(text("SELECT worker FROM episode_event ORDER BY id DESC LIMIT 1")).scalar_one() == "w"
    assert row(world, "episode", ready.episode_id).state == "CANCELLED"


def test_a_cancelled_episode_is_not_prepared_or_scored_either(world: World):
    first, second = world.feed()
    preparing = world.must_claim(first)
    scoring = world.must_claim(world.sample(world.prepare(second)))
    with world.database.begin() as conn:
        cancel.cancel_run(conn, world.run.id, why="by hand")
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        episodes.move(conn, preparing, EpisodeState.READY, why="late", prepared={})
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        sandboxes.record(conn, preparing, backend="b", node="n", handle="1-1")
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        episodes.move(conn, scoring, EpisodeState.SCORED, why="late", reward=1.0, reward_parts={})
    kept = row(world, "episode", second.episode_id)
    assert (kept.state, kept.outcome, kept.num_turns) == ("CANCELLED", "finished", 1)


def test_what_has_ended_stays_as_it_is_and_is_counted(world: World):
    first, second = world.feed()
    world.finish(first)
    cancel_one(world, second)
    with world.database.begin() as conn:
        again = cancel.cancel_groups(conn, [row(world, "episode", first.episode_id).group_id], why="again")
    assert again == Cancelled(
        num_cancelled=0, num_at_work=0, already_final=Counter({EpisodeState.SCORED: 1, EpisodeState.CANCELLED: 1})
    )
    assert row(world, "episode", first.episode_id).reward == 1.0
    assert row(world, "episode", second.episode_id).detail == "by hand"
    assert row(world, "episode_group", 1).num_final == 2
    assert count(world, "episode_event", "to_state = 'CANCELLED'") == 1


def test_unknown_ids_are_named_and_nothing_is_cancelled(world: World):
    wakeup = world.feed()[0]
    unknown = "no episode 998, 999 in the database; nothing was cancelled"
    with pytest.raises(SetupError, match=unknown), world.database.begin() as conn:
        cancel.cancel_episodes(conn, [999, wakeup.episode_id, 998], why="by hand")
    with pytest.raises(SetupError, match="no group 77 in the database"), world.database.begin() as conn:
        cancel.cancel_groups(conn, [1, 77], why="by hand")
    assert row(world, "episode", wakeup.episode_id).state == "NEW"


def test_a_group_completes_with_the_rest_and_is_dropped_without_a_baseline(world: World):
    first, second = world.feed()
    cancel_one(world, first)
    assert row(world, "episode_group", 1).state == "OPEN"
    world.finish(second)
    assert row(world, "episode_group", 1).state == "COMPLETE"
    with world.database.begin() as conn:
        take = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1)
    assert take.dropped == {DropReason.TOO_FEW: 1}
    with world.database.begin() as conn:
        assert groups.num_not_dropped(conn, world.run.id) == 0


def test_old_turns_of_a_cancelled_episode_make_no_group_stale(world: World):
    with world.database.begin() as conn:
        wakeups = groups.create(conn, run_id=world.run.id, task_ids=world.task_ids[:1], size=3)
    claim = world.must_claim(world.prepare(wakeups[0]))
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0, version=0))
    cancel_one(world, wakeups[0])
    for wakeup in wakeups[1:]:
        world.finish(wakeup, version=5)
    with world.database.begin() as conn:
        take = steps.take_groups(conn, world.run.id, version_in=5, num_groups=1, max_staleness=1)
    assert (take.step is not None, take.dropped) == (True, Counter())


@pytest.mark.parametrize("first", ["worker", "cancel"])
def test_whoever_locks_the_episode_first_wins_and_the_other_is_told(
    world: World, thread: ThreadPoolExecutor, first: str
):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    claim = world.must_claim(wakeup)

    def score() -> bool:
        try:
            with world.database.begin() as conn:
                episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=1.0, reward_parts={})
        except LeaseLost:
            return False
        return True

    if first == "worker":
        with world.database.begin() as conn:
            episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=1.0, reward_parts={})
            cancelling = thread.submit(cancel_one, world, wakeup)
            wait_until_blocked(world.database)
        assert cancelling.result(20) == Cancelled(
            num_cancelled=0, num_at_work=0, already_final=Counter({EpisodeState.SCORED: 1})
        )
    else:
        with world.database.begin() as conn:
            assert cancel.cancel_episodes(conn, [wakeup.episode_id], why="by hand").num_at_work == 1
            scoring = thread.submit(score)
            wait_until_blocked(world.database)
        assert scoring.result(20) is False
    assert row(world, "episode_group", 1).num_final == 1


def test_a_claim_that_waited_for_the_cancellation_gets_nothing(world: World, thread: ThreadPoolExecutor):
    wakeup = world.feed()[0]
    with world.database.begin() as conn:
        cancel.cancel_episodes(conn, [wakeup.episode_id], why="by hand")
        claiming = thread.submit(world.claim, wakeup)
        wait_until_blocked(world.database)
    assert claiming.result(20) is None


def test_heartbeats_workers_and_two_cancellations_at_once_leave_each_episode_final_and_counted_once(
    world: World, thread: ThreadPoolExecutor
):
    wakeups = [wakeup for _ in range(10) for wakeup in world.feed(6)]
    claims = [world.must_claim(wakeup) for wakeup in wakeups]

    def heartbeat() -> None:
        for _ in range(30):
            with world.database.begin() as conn:
                episodes.renew(conn, [claim.token for claim in reversed(claims)], lease_s=30)

    def fail_all() -> int:
        failed = 0
        for claim in reversed(claims):
            try:
                with world.database.begin() as conn:
                    retries.retry(conn, claim, outcome=Outcome.LEASE_LOST, detail="x", afresh=True, max_attempts=1)
                failed += 1
            except LeaseLost:
                continue
        return failed

    def cancel_all() -> int:
        with world.database.begin() as conn:
            ids = [wakeup.episode_id for wakeup in wakeups]
            return cancel.cancel_episodes(conn, ids, why="at once").num_cancelled

    def cancel_run() -> int:
        with world.database.begin() as conn:
            return cancel.cancel_run(conn, world.run.id, why="at once").num_cancelled

    beating = thread.submit(heartbeat)
    ending = [thread.submit(end) for end in (fail_all, cancel_all, cancel_run)]
    beating.result(60)
    assert sum(each.result(60) for each in ending) == len(wakeups)
    assert count(world, "episode", "state IN ('FAILED', 'CANCELLED') AND claim_token IS NULL") == len(wakeups)
    assert count(world, "episode_group", "state = 'COMPLETE' AND num_final = size") == 60


def test_a_paused_run_gets_no_groups_until_it_is_resumed(world: World):
    published: list[Wakeup] = []
    feeder = ready_feeder(world, published)
    with world.database.begin() as conn:
        run_control.pause(conn, world.run.name)
    assert (feeder.round(), state_of_run(world)) == (0, RunState.PAUSED)
    with world.database.begin() as conn:
        run_control.resume(conn, world.run.name)
    assert feeder.round() == world.run.config.groups_in_flight
    assert len(published) == count(world, "episode", "state = 'NEW'")


def ready_feeder(world: World, published: list[Wakeup]) -> Feeder:
    """A feeder whose run has an engine that serves."""
    with world.database.begin() as conn:
        (engine,) = engines.own(conn, "keeper", lease_s=60)
        engines.loaded(conn, engine.id, owner="keeper", version=0)
    return Feeder(world.database, published.extend)


@pytest.mark.parametrize("first", ["feeder", "stop"])
def test_no_group_outlives_a_stop_that_meets_the_feeder(world: World, thread: ThreadPoolExecutor, first: str):
    if first == "feeder":
        with world.database.begin() as conn:
            assert runs.lock_cursor(conn, world.run.id) is not None
            stopping = thread.submit(stop, world)
            wait_until_blocked(world.database)
            groups.create(conn, run_id=world.run.id, task_ids=world.task_ids[:3], size=2)
        assert stopping.result(20).episodes.num_cancelled == 6
        assert count(world, "episode_group", "state = 'DROPPED' AND drop_reason = 'run_stopped'") == 3
    else:
        feeder = ready_feeder(world, [])
        feeder.round()
        before = count(world, "episode_group", "true")
        with world.database.begin() as conn:
            run_control.stop(conn, world.run.name, why="enough")
            feeding = thread.submit(feeder.round)
            wait_until_blocked(world.database)
        assert feeding.result(20) == 0
        assert count(world, "episode_group", "true") == before
    assert count(world, "episode", "state <> 'CANCELLED'") == 0


def test_stopping_ends_episodes_groups_and_the_open_step_and_keeps_what_was_trained(world: World):
    trained, taken, complete = (world.feed(2) for _ in range(3))
    for wakeup in (*trained, *taken, *complete[:2]):
        world.finish(wakeup)
    assert train(world) is True
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=1, num_groups=2, max_staleness=1).step
    assert step is not None

    stopped = stop(world)

    assert (stopped.episodes.num_cancelled, stopped.num_groups_dropped) == (2, 4)
    assert state_of_run(world) is RunState.STOPPED
    assert count(world, "episode_group", "state = 'TRAINED'") == 2
    assert count(world, "episode_group", "state = 'DROPPED' AND drop_reason = 'run_stopped'") == 4
    with world.database.begin() as conn:
        assert steps.open_step(conn, world.run.id) is None
        assert finish(conn, step) is False
    assert count(world, "policy_version", "number = 2") == 0


def train(world: World) -> bool:
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step
        assert step is not None
        return finish(conn, step)


def finish(conn: Connection, step: steps.Step) -> bool:
    trained = [
        steps.TrainedEpisode(episode_id=episode.episode_id, digest=b"d", advantage=0.0, num_tokens=3)
        for group in steps.load_groups(conn, step.id)
        for episode in group.episodes
    ]
    published = Published(location="/nowhere", manifest_sha256="0")
    return steps.finish_step(conn, step, published=published, metrics={}, trained=trained)


def test_a_take_that_meets_a_stop_leaves_no_open_step(world: World, thread: ThreadPoolExecutor):
    for wakeup in world.feed(2):
        world.finish(wakeup)

    def take() -> steps.Take:
        with world.database.begin() as conn:
            return steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1)

    with world.database.begin() as conn:
        assert run_control.stop(conn, world.run.name, why="enough").num_groups_dropped == 2
        taking = thread.submit(take)
        wait_until_blocked(world.database)
    assert taking.result(20) == steps.Take(step=None, dropped=Counter())


def test_a_stop_that_meets_a_take_drops_what_was_taken(world: World, thread: ThreadPoolExecutor):
    for wakeup in world.feed(2):
        world.finish(wakeup)
    with world.database.begin() as conn:
        assert steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step is not None
        stopping = thread.submit(stop, world)
        wait_until_blocked(world.database)
    assert stopping.result(20).num_groups_dropped == 2
    assert count(world, "train_step", "state = 'DROPPED'") == 1


def test_a_step_that_is_committing_is_trained_before_the_stop(world: World, thread: ThreadPoolExecutor):
    for wakeup in world.feed(2):
        world.finish(wakeup)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step
    assert step is not None
    with world.database.begin() as conn:
        assert finish(conn, step) is True
        stopping = thread.submit(stop, world)
        wait_until_blocked(world.database)
    assert stopping.result(20).num_groups_dropped == 0
    assert count(world, "policy_version", "number = 1") == 1


def test_a_paused_run_can_finish_and_a_stopped_one_stays_stopped(world: World):
    with world.database.begin() as conn:
        run_control.pause(conn, world.run.name)
        runs.finish(conn, world.run.id)
    assert state_of_run(world) is RunState.FINISHED
    with world.database.begin() as conn:
        other = runs.open_run(conn, RunConfig(name="run-b", model=world.run.config.model))
        run_control.stop(conn, "run-b", why="enough")
        runs.finish(conn, other.id)
        assert runs.require(conn, "run-b").state is RunState.STOPPED


@pytest.mark.parametrize(
    ("before", "then", "line"),
    [
        ("", "resume", "run run-a is active: only one that is paused can become active"),
        ("pause", "pause", "run run-a is paused: only one that is active can become paused"),
        ("stop", "resume", "run run-a is stopped: only one that is paused can become active"),
        ("stop", "stop", "run run-a is stopped: only one that is active or paused can become stopped"),
        ("finish", "stop", "run run-a is finished: only one that is active or paused can become stopped"),
    ],
)
def test_moves_that_a_run_may_not_make_are_refused_with_where_it_stands(
    world: World, before: str, then: str, line: str
):
    actions: dict[str, Callable[[Any], object]] = {
        "": lambda conn: None,
        "pause": lambda conn: run_control.pause(conn, "run-a"),
        "resume": lambda conn: run_control.resume(conn, "run-a"),
        "stop": lambda conn: run_control.stop(conn, "run-a", why="enough"),
        "finish": lambda conn: runs.finish(conn, world.run.id),
    }
    with world.database.begin() as conn:
        actions[before](conn)
    with pytest.raises(SetupError, match=line), world.database.begin() as conn:
        actions[then](conn)


def test_an_unknown_run_is_refused_with_those_there_are(world: World):
    unknown = "no run run-z in the database; there are: run-a"
    with pytest.raises(SetupError, match=unknown), world.database.begin() as conn:
        run_control.pause(conn, "run-z")


def test_cancelled_episodes_wait_for_no_stage(world: World):
    world.feed()
    stop(world)
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=0) == []
    assert world.claim(Wakeup(stage=Stage.INIT, episode_id=1, attempt=1)) is None
