"""A run whose stored configuration this release refuses stands still by itself: no other run, and no episode, pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, evaluations, retries, runs, versions
from common.db.episodes import Claim, Wakeup
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState, Stage
from common.errors import UnreadableConfig
from common.settings import Settings
from common.weights import Published
from tests.integration.conftest import Answer
from tests.integration.world import World
from workers.broker import check_held
from workers.feeder import Feeder
from workers.leases import Leases
from workers.stage import Done, StageWorker

CANNOT = "run run-a: this release cannot use its stored configuration: "
FIELDS = {
    "{rollout,temperature}": (
        "0.001",
        "rollout.temperature: Input should be greater than or equal to 0.01 (got 0.001)",
    ),
    "{rollout,best_of}": ("8", "rollout.best_of = 8 is a field that it does not know"),
}


def store(world: World, path: str, value: str) -> None:
    """As another release has stored it."""
    with world.database.begin() as conn:
        conn.execute(
            text(
                "UPDATE run SET config = jsonb_set(config, CAST(:path AS text[]), CAST(:value AS jsonb)) WHERE id = :id"
            ),
            {"path": path, "value": value, "id": world.run.id},
        )


@pytest.fixture
def broken(world: World) -> World:
    """The world's run, with episodes in flight, which is then broken."""
    world.feed(2)
    store(world, "{rollout,temperature}", "0.001")
    return world


def open_healthy(database: Database) -> Run:
    config = RunConfig(
        name="healthy",
        model=Path("model"),
        num_tasks=4,
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, minibatches=1),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://healthy", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0"))
    return run


def stage_worker(world: World, stage: Stage) -> tuple[StageWorker, list[Claim]]:
    """A worker that does the stage at once, and what it has claimed."""
    claimed: list[Claim] = []

    def work(claim: Claim) -> Future[Done]:
        claimed.append(claim)
        done: Future[Done] = Future()
        done.set_result(Done(to=EpisodeState.READY, why="prepared", prepared={"sandbox": None}))
        return done

    settings = Settings()
    leases = Leases(world.database, lease_s=settings.lease_s, heartbeat_s=settings.heartbeat_s)
    worker = StageWorker(
        stage, work, database=world.database, leases=leases, settings=settings, worker="w", publish=lambda _: None
    )
    return worker, claimed


@pytest.mark.parametrize(("path", "value", "problem"), [(path, *told) for path, told in FIELDS.items()])
def test_it_is_named_with_field_and_value_by_whoever_needs_it(world: World, path: str, value: str, problem: str):
    store(world, path, value)
    with world.database.begin() as conn:
        run = runs.require(conn, "run-a")
    assert run.id == world.run.id
    with pytest.raises(UnreadableConfig) as raised:
        _ = run.config
    assert str(raised.value).startswith(CANNOT + problem)
    assert "`rollmill run stop run-a`" in str(raised.value)


@pytest.mark.parametrize("capacity", [None, 24])
def test_the_feeder_feeds_the_others_and_says_why_once(
    broken: World, caplog: pytest.LogCaptureFixture, capacity: int | None
):
    healthy = open_healthy(broken.database)
    sent: list[Wakeup] = []
    feeder = Feeder(broken.database, sent.extend, max_episodes_in_flight=capacity)
    num_before = broken_states(broken)
    with caplog.at_level(logging.ERROR):
        feeder.round()
        feeder.round()
    with broken.database.begin() as conn:
        fed = conn.execute(
            text("SELECT DISTINCT run_id FROM episode WHERE id = ANY(:ids)"), {"ids": [w.episode_id for w in sent]}
        )
        assert fed.scalars().all() == [healthy.id]
        assert CANNOT in (runs.error_of(conn, broken.run.id) or "")
        assert runs.error_of(conn, healthy.id) is None
    assert broken_states(broken) == num_before
    assert [record.message.count(CANNOT) for record in caplog.records] == [1]


def broken_states(world: World) -> list[tuple[str, int, int, bool]]:
    with world.database.begin() as conn:
        rows = conn.execute(
            text("SELECT state, attempt, failures, claim_token IS NULL FROM episode WHERE run_id = :id ORDER BY id"),
            {"id": world.run.id},
        )
        return [tuple(row) for row in rows]


def test_a_feeder_that_has_fed_it_before_leaves_it_alone_too(world: World):
    open_healthy(world.database)
    feeder = Feeder(world.database, lambda _: None)
    assert feeder.round() > 0
    store(world, "{rollout,temperature}", "0.001")
    feeder.round()
    with world.database.begin() as conn:
        assert CANNOT in (runs.error_of(conn, world.run.id) or "")


def test_its_episodes_wait_unclaimed_at_no_cost_and_go_on_when_it_can_be_read(
    broken: World, caplog: pytest.LogCaptureFixture
):
    worker, claimed = stage_worker(broken, Stage.INIT)
    with broken.database.begin() as conn:
        waiting = episodes.resend(conn, after_s=0)
    assert len(waiting) == 4
    with caplog.at_level(logging.ERROR):
        for wakeup in waiting:
            worker.perform(wakeup.episode_id, wakeup.attempt)
    assert claimed == []
    assert broken_states(broken) == [("NEW", 1, 0, True)] * 4
    assert [record.message.count(CANNOT) for record in caplog.records] == [1]

    store(broken, "{rollout,temperature}", "1.0")
    with broken.database.begin() as conn:
        assert retries.reap(conn, max_attempts=5) == []
        again = episodes.resend(conn, after_s=0)
    assert sorted(wakeup.episode_id for wakeup in again) == sorted(wakeup.episode_id for wakeup in waiting)
    for wakeup in again:
        worker.perform(wakeup.episode_id, wakeup.attempt)
    assert broken_states(broken) == [("READY", 1, 0, True)] * 4


def test_a_fleet_starts_beside_it_and_its_engines_find_their_version(broken: World):
    open_healthy(broken.database)
    check_held(Stage.RUN, broken.database, Settings(), (3, 13, 0))
    with broken.database.begin() as conn:
        versions.publish(conn, broken.run.id, 0, Published(location="/weights/run-a/000000", manifest_sha256="sha"))
        wanted = versions.wanted(conn, broken.run.id)
        assert wanted is not None
        assert wanted.number == 0
        assert [version.run for version in versions.loadable(conn)] == ["run-a"]
        assert evaluations.oldest_open(conn, broken.run.id) is None


def test_the_commands_go_on_for_the_others_and_name_it(broken: World, rollmill: Callable[..., Answer]):
    open_healthy(broken.database)
    for command in (("status",), ("run", "list")):
        code, said = rollmill(*command)
        assert code == 0
        (healthy,) = (line for line in said.splitlines() if line.startswith("healthy "))
        assert "- of " in healthy
        (row,) = (line for line in said.splitlines() if line.startswith("run-a "))
        assert "- of ?" in row
        assert said.count(CANNOT.removeprefix("run run-a: ")) == 1
    code, said = rollmill("run", "share")
    assert (code, "run-a" in said) == (0, True)
    for named in (
        ("report", "run-a"),
        ("run", "extend", "run-a", "--versions", "9"),
        ("run", "share", "run-a", "--weight", "2"),
    ):
        code, said = rollmill(*named)
        assert code == 2
        assert said.startswith(f"rollmill: {CANNOT}rollout.temperature"), said


def test_it_can_be_paused_resumed_cancelled_and_stopped(broken: World, rollmill: Callable[..., Answer]):
    assert rollmill("run", "pause", "run-a")[0] == 0
    assert rollmill("run", "resume", "run-a")[0] == 0
    assert rollmill("cancel", "--run", "run-a") == (0, "4 episodes cancelled\n")
    assert rollmill("run", "stop", "run-a")[0] == 0
