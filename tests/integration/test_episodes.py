from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text

from common.config import RunConfig
from common.db import episodes, groups, retries, steps, turns, versions
from common.db.episodes import Wakeup
from common.db.retries import Backoff
from common.db.session import Database
from common.episode import DropReason, EpisodeState, Stage
from common.errors import LeaseLost, SetupError
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn

PUBLISHED = Published(location="weights", manifest_sha256="0" * 64)


def row(database: Database, table: str, id: int) -> Any:
    with database.begin() as conn:
        return conn.execute(text(f"SELECT * FROM {table} WHERE id = :id"), {"id": id}).one()


def expire(database: Database) -> None:
    with database.begin() as conn:
        conn.execute(text("UPDATE episode SET lease_until = now() - interval '1 second' WHERE claim_token IS NOT NULL"))


def reap(database: Database, max_attempts: int = 5) -> list[Wakeup]:
    with database.begin() as conn:
        return retries.reap(conn, max_attempts=max_attempts)


class ReadMeanwhile(dict[int, RunConfig]):
    """What a process knows of runs, to which another thread adds one as soon as somebody has looked."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __iter__(self) -> Iterator[int]:
        known = list(super().__iter__())
        self[self._world.run.id] = self._world.run.config
        return iter(known)


def test_a_run_that_another_thread_reads_meanwhile_costs_no_message(world: World) -> None:
    with world.database.begin() as conn:
        claim = episodes.claim(
            conn, world.feed()[0], worker="w", token=uuid4(), lease_s=30, configs=ReadMeanwhile(world)
        )
    assert claim is not None


def test_second_delivery_loses(world: World):
    wakeup = world.feed()[0]
    assert world.claim(wakeup) is not None
    assert world.claim(wakeup) is None


def test_a_message_of_another_stage_or_attempt_claims_nothing(world: World):
    wakeup = world.feed()[0]
    for wrong in (
        Wakeup(stage=Stage.RUN, episode_id=wakeup.episode_id, attempt=1),
        Wakeup(stage=Stage.INIT, episode_id=wakeup.episode_id, attempt=2),
        Wakeup(stage=Stage.INIT, episode_id=10**9, attempt=1),
    ):
        assert world.claim(wrong) is None


def test_a_group_is_complete_when_its_last_episode_is_final(world: World):
    first, second = world.feed()
    world.finish(first)
    group_id = row(world.database, "episode", first.episode_id).group_id
    assert row(world.database, "episode_group", group_id).state == "OPEN"
    world.finish(second)
    assert row(world.database, "episode_group", group_id).state == "COMPLETE"


def test_every_move_leaves_an_event(world: World):
    wakeup = world.feed()[0]
    world.finish(wakeup)
    with world.database.begin() as conn:
        events = conn.execute(
            text("SELECT from_state, to_state FROM episode_event WHERE episode_id = :id ORDER BY id"),
            {"id": wakeup.episode_id},
        ).all()
    assert [tuple(event) for event in events] == [
        (None, "NEW"),
        ("NEW", "READY"),
        ("READY", "SAMPLED"),
        ("SAMPLED", "SCORED"),
    ]


def test_a_late_worker_writes_nothing_after_its_lease_was_taken(world: World):
    wakeup = world.prepare(world.feed()[0])
    late = world.must_claim(wakeup)
    expire(world.database)
    (again,) = reap(world.database)
    current = world.must_claim(again)

    with pytest.raises(LeaseLost), world.database.begin() as conn:
        turns.save(conn, late, make_turn(0))
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        turns.save_last(conn, late, make_turn(0), outcome=Outcome.FINISHED)
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        episodes.move(conn, late, EpisodeState.SAMPLED, why="late", outcome=Outcome.FINISHED)
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        retries.retry(conn, late, outcome=Outcome.ENGINE_LOST, detail="late", afresh=True, max_attempts=5)
    with world.database.begin() as conn:
        assert episodes.renew(conn, [late.token, current.token], lease_s=5) == {current.token}
        assert turns.load(conn, wakeup.episode_id, 1) == []


def test_run_goes_on_from_its_stored_turns_when_it_has_no_sandbox(world: World):
    wakeup = world.prepare(world.feed()[0])
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
    expire(world.database)

    assert reap(world.database) == [wakeup]

    with world.database.begin() as conn:
        assert turns.load(conn, wakeup.episode_id, 1) == [make_turn(0)]


def test_run_with_a_sandbox_starts_a_new_attempt_and_keeps_the_old_turns(world: World):
    wakeup = world.prepare(world.feed()[0], sandbox="box")
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
    expire(world.database)

    assert reap(world.database) == [Wakeup(stage=Stage.INIT, episode_id=wakeup.episode_id, attempt=2)]

    stored = row(world.database, "episode", wakeup.episode_id)
    assert (stored.state, stored.num_turns, stored.num_sampled, stored.version_min) == ("NEW", 0, 0, None)
    with world.database.begin() as conn:
        assert turns.load(conn, wakeup.episode_id, 1) == [make_turn(0)]
        assert turns.load(conn, wakeup.episode_id, 2) == []


def test_a_turn_is_stored_once(world: World):
    claim = world.must_claim(world.prepare(world.feed()[0]))
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
    with pytest.raises(LeaseLost), world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))


def test_a_poison_episode_ends_failed_with_its_last_error_and_no_reward(world: World):
    first, second = world.feed()
    world.finish(second)
    for _ in range(3):
        world.must_claim(Wakeup(stage=Stage.INIT, episode_id=first.episode_id, attempt=_attempt(world, first)))
        expire(world.database)
        reap(world.database, max_attempts=3)

    stored = row(world.database, "episode", first.episode_id)
    assert (stored.state, stored.outcome, stored.reward) == ("FAILED", "lease_lost", None)
    assert "lease ran out" in stored.detail
    assert row(world.database, "episode_group", stored.group_id).state == "COMPLETE"


def _attempt(world: World, wakeup: Wakeup) -> int:
    attempt: int = row(world.database, "episode", wakeup.episode_id).attempt
    return attempt


def test_eval_is_retried_on_the_turns_it_has(world: World):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        again = retries.retry(conn, claim, outcome=Outcome.HANDLER_FAILED, detail="boom", afresh=False, max_attempts=5)
    assert again == wakeup
    world.score(wakeup, 0.5)
    assert row(world.database, "episode", wakeup.episode_id).reward == 0.5


def test_an_orderly_shutdown_costs_no_attempt(world: World):
    wakeup = world.prepare(world.feed()[0])
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        assert retries.release(conn, [claim.token], why="shutting down") == [wakeup]
    stored = row(world.database, "episode", wakeup.episode_id)
    assert (stored.failures, stored.claim_token) == (0, None)
    assert world.claim(wakeup) is not None


def test_only_unclaimed_and_old_episodes_are_announced_again(world: World):
    claimed, waiting = world.feed()
    world.must_claim(claimed)
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=60) == []
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=0) == [waiting]


def test_the_trainer_takes_the_oldest_fresh_groups_and_drops_the_stale(world: World):
    wakeups = world.feed(3)
    for index, wakeup in enumerate(wakeups):
        world.finish(wakeup, version=0 if index < 2 else 2)
    with world.database.begin() as conn:
        take = steps.take_groups(conn, world.run.id, version_in=2, num_groups=2, max_staleness=1)
    assert take.step is not None
    assert take.dropped == {DropReason.STALE: 1}
    with world.database.begin() as conn:
        taken = steps.load_groups(conn, take.step.id)
        assert steps.open_step(conn, world.run.id) == take.step
    assert [len(group.episodes) for group in taken] == [2, 2]
    assert taken[0].episodes[0].turns[0].sampled_ids.tolist() == [5, 6, 7]
    assert taken[0].episodes[0].turns[0].versions.tolist() == [2, 2, 2]


def test_one_stale_sibling_drops_its_whole_group(world: World):
    for wakeup, version in zip(world.feed(2), (0, 2, 1, 2), strict=True):
        world.finish(wakeup, version=version)
    with world.database.begin() as conn:
        take = steps.take_groups(conn, world.run.id, version_in=2, num_groups=1, max_staleness=1)
        assert take.dropped == {DropReason.STALE: 1}
        assert take.step is not None
        (taken,) = steps.load_groups(conn, take.step.id)
    assert [episode.turns[0].versions[0] for episode in taken.episodes] == [1, 2]


def test_too_few_groups_are_left_for_the_next_poll(world: World):
    for wakeup in world.feed(1):
        world.finish(wakeup)
    with world.database.begin() as conn:
        assert steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step is None
        assert steps.open_step(conn, world.run.id) is None


def test_a_trained_group_keeps_its_slot_until_its_version_is_live(world: World):
    for wakeup in world.feed(2):
        world.finish(wakeup)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step
        assert step is not None
        assert groups.num_in_flight(conn, world.run.id, live_version=0) == 2
        steps.finish_step(conn, step, published=PUBLISHED, metrics={}, trained=[])
        assert groups.num_in_flight(conn, world.run.id, live_version=0) == 2
        assert groups.num_in_flight(conn, world.run.id, live_version=1) == 0
        assert groups.num_not_dropped(conn, world.run.id) == 2


def test_a_step_is_finished_once(world: World):
    for wakeup in world.feed(1):
        world.finish(wakeup)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=1, max_staleness=1).step
        assert step is not None
        steps.finish_step(conn, step, published=PUBLISHED, metrics={"loss": 1.0}, trained=[])
    late = Published(location="late", manifest_sha256="1" * 64)
    with pytest.raises(SetupError, match="is not open"), world.database.begin() as conn:
        steps.finish_step(conn, step, published=late, metrics={"loss": 2.0}, trained=[])
    assert row(world.database, "train_step", step.id).metrics == {"loss": 1.0}
    with world.database.begin() as conn:
        newest = versions.newest(conn, world.run.id)
    assert newest is not None
    assert newest.path == PUBLISHED.path


def test_a_new_attempt_knows_nothing_of_the_old_sandbox(world: World):
    world.must_claim(world.prepare(world.feed()[0], sandbox="box"))
    expire(world.database)
    (again,) = reap(world.database)
    assert world.must_claim(again).prepared is None


def test_a_run_without_an_engine_stands_still_and_uses_up_no_attempt(world: World):
    ready = world.prepare(world.feed()[0])
    with world.database.begin() as conn:
        conn.execute(text("DELETE FROM engine"))
    assert world.claim(ready) is None
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=0) == []


def test_a_stale_group_that_completes_during_a_take_is_not_taken(world: World):
    wakeups = [wakeup for _ in range(10) for wakeup in world.feed(3)]
    for wakeup in wakeups[:-1]:
        world.sample(world.prepare(wakeup))

    def complete() -> None:
        for wakeup in wakeups[:-1]:
            world.score(Wakeup(stage=Stage.EVAL, episode_id=wakeup.episode_id, attempt=1))

    with ThreadPoolExecutor(1) as executor:
        completing = executor.submit(complete)
        while not completing.done():
            with world.database.begin() as conn:
                take = steps.take_groups(conn, world.run.id, version_in=9, num_groups=1, max_staleness=1)
            assert take.step is None
        completing.result()


def test_a_claim_says_how_many_turns_there_are_to_go_on_from(world: World):
    wakeup = world.prepare(world.feed()[0])
    first = world.must_claim(wakeup, lease_s=-1)
    with world.database.begin() as conn:
        turns.save(conn, first, make_turn(0))
        (again,) = retries.reap(conn, max_attempts=5)
    assert (first.num_turns, world.must_claim(again).num_turns) == (0, 1)


def test_a_claim_takes_the_configuration_that_its_process_has_parsed(world: World):
    known = world.run.config.model_copy(update={"seed": 99})
    with world.database.begin() as conn:
        claims = [
            episodes.claim(conn, wakeup, worker="w", token=uuid4(), lease_s=30, configs=configs)
            for wakeup, configs in zip(world.feed(), ({world.run.id: known}, {world.run.id + 1: known}), strict=True)
        ]
    assert [claim and claim.config for claim in claims] == [known, world.run.config]


def fail(world: World, wakeup: Wakeup, backoff: Backoff) -> float | None:
    """Seconds that an episode whose EVAL fails has to wait; None = its message is sent at once."""
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        again = retries.retry(
            conn, claim, outcome=Outcome.HANDLER_FAILED, detail="boom", afresh=False, max_attempts=99, backoff=backoff
        )
        wait_s = conn.execute(
            text("SELECT extract(epoch FROM not_before - now()) FROM episode WHERE id = :id"), {"id": wakeup.episode_id}
        ).scalar_one()
    assert again == (wakeup if wait_s is None else None)
    return None if wait_s is None else float(wait_s)


def come_due(world: World) -> None:
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET not_before = now() - interval '1 ms' WHERE not_before IS NOT NULL"))


def test_each_failure_after_the_first_doubles_the_wait_up_to_its_bound(world: World):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    waits = []
    for _ in range(6):
        waits.append(fail(world, wakeup, Backoff(first_s=1.5, max_s=10)))
        come_due(world)
    assert waits == [None, 1.5, 3.0, 6.0, 10.0, 10.0]


def test_an_episode_that_waits_is_neither_claimed_nor_announced_before_its_time_and_then_announced_once(world: World):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    backoff = Backoff(first_s=60, max_s=60)
    assert fail(world, wakeup, backoff) is None
    assert fail(world, wakeup, backoff) == 60

    assert world.claim(wakeup) is None
    with world.database.begin() as conn:
        assert wakeup not in episodes.resend(conn, after_s=0)
    come_due(world)
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=60) == [wakeup]
    with world.database.begin() as conn:
        assert episodes.resend(conn, after_s=60) == []
    world.score(wakeup)


def test_a_lost_lease_waits_only_from_the_second_on(world: World):
    wakeup = world.feed()[0]
    backoff = Backoff(first_s=60, max_s=60)
    world.must_claim(wakeup, lease_s=-1)
    with world.database.begin() as conn:
        (again,) = retries.reap(conn, max_attempts=9, backoff=backoff)
    world.must_claim(again, lease_s=-1)
    with world.database.begin() as conn:
        assert retries.reap(conn, max_attempts=9, backoff=backoff) == []
    assert row(world.database, "episode", wakeup.episode_id).attempt == 3


def test_a_failed_episode_waits_for_nothing(world: World):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    fail(world, wakeup, Backoff(first_s=60, max_s=60))
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        retries.retry(
            conn,
            claim,
            outcome=Outcome.HANDLER_FAILED,
            detail="boom",
            afresh=False,
            max_attempts=2,
            backoff=Backoff(first_s=60, max_s=60),
        )
    stored = row(world.database, "episode", wakeup.episode_id)
    assert (stored.state, stored.not_before) == ("FAILED", None)
