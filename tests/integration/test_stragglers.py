"""Groups that are made with more episodes than they need: who comes last is not waited for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit, cancel, engines, episodes, report, retries, runs, sandboxes, snapshot, steps, tasks
from common.db.episodes import Claim, Wakeup
from common.db.session import Database
from common.episode import EpisodeState
from common.errors import LeaseLost
from common.outcomes import Outcome
from tests.integration.world import World

WANTED, SIZE = 2, 4


@pytest.fixture
def world(database: Database) -> World:
    """A run whose groups of two are made with four episodes."""
    config = RunConfig(
        name="run-a",
        model=Path("model"),
        rollout=RolloutConfig(group_size=WANTED, oversample=SIZE - WANTED),
        train=TrainConfig(groups_per_step=1, minibatches=1),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        tasks.load(conn, dataset="d", handler="calculator", payloads=[(str(i), {"number": i}) for i in range(6)])
        engines.register(conn, "http://engine", run_id=run.id)
        return World(database, run, tasks.ids(conn, "d"))


def states(world: World) -> list[tuple[str, str | None]]:
    with world.database.begin() as conn:
        rows = conn.execute(text("SELECT state, detail FROM episode ORDER BY id"))
        return [(row.state, row.detail) for row in rows]


def group(world: World) -> tuple[str, int, bool]:
    with world.database.begin() as conn:
        row = conn.execute(text("SELECT state, num_final, completed_at FROM episode_group WHERE id = 1")).one()
        return row.state, row.num_final, row.completed_at is not None


def score(world: World, claim: Claim, reward: float = 1.0) -> bool:
    try:
        with world.database.begin() as conn:
            episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=reward, reward_parts={})
    except LeaseLost:
        return False
    return True


def fail(world: World, wakeup: Wakeup) -> None:
    claim = world.must_claim(wakeup)
    with world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.ENGINE_LOST, detail="gone", afresh=False, max_attempts=1)


def test_with_enough_scores_the_rest_is_cancelled_and_the_group_complete_at_once(world: World):
    first, second, third, fourth = world.feed()
    world.finish(first)
    assert group(world) == ("OPEN", 1, False)
    waiting = world.prepare(third)
    at_work = world.must_claim(fourth)
    with world.database.begin() as conn:
        sandboxes.record(conn, at_work, backend="folder", node="here", handle="box")
    world.finish(second)

    assert group(world) == ("COMPLETE", SIZE, True)
    assert states(world) == [("SCORED", None)] * 2 + [("CANCELLED", "straggler")] * 2
    assert world.claim(waiting) is None
    with world.database.begin() as conn:
        # The worker's next heartbeat tells it to stop, and the reaper finds the sandbox.
        assert episodes.renew(conn, [at_work.token], lease_s=30) == set()
        assert [row.handle for row in sandboxes.orphans(conn, node="here")] == ["box"]
        events = conn.execute(text("SELECT from_state, worker, why FROM episode_event WHERE to_state = 'CANCELLED'"))
        assert sorted(map(tuple, events), key=str) == [("NEW", "w", "straggler"), ("READY", None, "straggler")]


def test_what_failed_or_was_cancelled_is_made_up_by_the_others(world: World):
    first, second, third, fourth = world.feed()
    fail(world, first)
    world.finish(second)
    with world.database.begin() as conn:
        cancel.cancel_episodes(conn, [third.episode_id], why="by hand")
    assert group(world) == ("OPEN", 3, False)
    world.finish(fourth)
    assert group(world) == ("COMPLETE", SIZE, True)
    assert states(world) == [("FAILED", "gone"), ("SCORED", None), ("CANCELLED", "by hand"), ("SCORED", None)]


def test_a_group_that_cannot_get_enough_scores_is_complete_when_all_are_final(world: World):
    first, *others = world.feed()
    world.finish(first)
    for wakeup in others:
        fail(world, wakeup)
    assert group(world) == ("COMPLETE", SIZE, True)


def test_two_that_score_at_the_same_moment_count_each_other(world: World):
    claims = [world.must_claim(world.sample(world.prepare(wakeup))) for wakeup in world.feed()[:2]]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda claim: score(world, claim), claims)) == [True, True]
    assert group(world) == ("COMPLETE", SIZE, True)
    assert [state for state, _ in states(world)] == ["SCORED"] * 2 + ["CANCELLED"] * 2


def test_scores_beside_heartbeats_failures_and_cancellations_neither_deadlock_nor_miscount(world: World):
    """30 groups whose four episodes all score at once, backwards and forwards, under everybody who locks them."""
    claims = [world.must_claim(world.sample(world.prepare(wakeup))) for _ in range(5) for wakeup in world.feed(6)]
    tokens = [claim.token for claim in claims]

    def heartbeats() -> None:
        for _ in range(60):
            with world.database.begin() as conn:
                episodes.renew(conn, tokens[::-1], lease_s=30)

    def score_all(part: list[Claim]) -> int:
        return sum(score(world, claim) for claim in part)

    def cancel_some() -> None:
        for claim in claims[::7]:
            with world.database.begin() as conn:
                cancel.cancel_groups(conn, [claim.group_id], why="by hand")

    with ThreadPoolExecutor(6) as pool:
        beating, cancelling = pool.submit(heartbeats), pool.submit(cancel_some)
        scored = sum(pool.map(score_all, (claims[::4], claims[1::4], claims[2::4][::-1], claims[3::4][::-1])))
        beating.result(60)
        cancelling.result(60)

    with world.database.begin() as conn:
        rows = conn.execute(
            text(
                "SELECT g.state, g.num_final, count(*) FILTER (WHERE e.state = 'SCORED') AS scored,"
                " count(*) FILTER (WHERE e.state NOT IN ('SCORED', 'CANCELLED')) AS moving"
                " FROM episode_group g JOIN episode e ON e.group_id = g.id GROUP BY g.id"
            )
        ).all()
        deadlocks = conn.execute(
            text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        ).scalar_one()
    assert len(rows) == 30
    assert {(row.state, row.num_final, row.moving) for row in rows} == {("COMPLETE", SIZE, 0)}
    assert sum(row.scored for row in rows) == scored
    assert all(row.scored <= WANTED for row in rows)
    assert deadlocks == 0


def test_a_group_with_stragglers_is_trained_reported_and_passes_the_audit(world: World):
    first, second, *_ = world.feed()
    world.finish(first, reward=0.0)
    world.finish(second, reward=1.0)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=1, max_staleness=1).step
        assert step is not None
        (taken,) = steps.load_groups(conn, step.id)
        assert [episode.reward for episode in taken.episodes] == [0.0, 1.0]
        assert audit.violations(conn, world.run.id) | {"groups_unsettled": 0} == dict.fromkeys(audit.CHECKS, 0)
        conn.execute(text("UPDATE episode_group SET state = 'TRAINED'"))
        found = report.summary(conn, world.run.id)
        assert (found.episodes_cancelled, found.episodes_stragglers) == (2, 2)
        assert snapshot.take_snapshot(conn, world.run.id).episodes[EpisodeState.CANCELLED] == 2
