"""Groups whose rewards are all equal: trained, or dropped and replaced, exactly as many and not for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit, engines, episodes, report, retries, runs, steps, tasks, versions
from common.db.runs import DataCursor, Run
from common.db.session import Database
from common.db.steps import Take, TrainedEpisode
from common.episode import DropReason, EpisodeState, Stage, episode_digest
from common.errors import DatabaseUnavailable
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn, unheard
from trainer.source import wait_for_work
from workers.feeder import Feeder, next_tasks

PUBLISHED = Published(location="model", manifest_sha256="0" * 64)


def open_world(
    database: Database, *, name: str = "run-a", num_tasks: int = 50, group_size: int = 2, **train: object
) -> World:
    """A run that replaces groups without variance and has an engine that serves."""
    given = {"groups_per_step": 2, "minibatches": 1, "num_versions": 3, "zero_variance": "refill", **train}
    config = RunConfig(
        name=name,
        model=Path("model"),
        num_tasks=num_tasks,
        rollout=RolloutConfig(group_size=group_size),
        train=TrainConfig.model_validate(given),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, f"http://{name}", run_id=run.id)
    serve(database, run, 0)
    return World(database, run, [])


def serve(database: Database, run: Run, version: int) -> None:
    with database.begin() as conn:
        conn.execute(text("UPDATE engine SET version = :v WHERE run_id = :id"), {"v": version, "id": run.id})


def play(world: World, *rewards: tuple[float, ...], version: int = 0, parts: bool = False) -> None:
    """Finish the oldest groups with these rewards."""
    with world.database.begin() as conn:
        ids = conn.execute(
            text("SELECT id FROM episode WHERE run_id = :id AND state = 'NEW' ORDER BY id"), {"id": world.run.id}
        ).scalars()
        wakeups = [episodes.Wakeup(stage=Stage.INIT, episode_id=id, attempt=1) for id in ids]
    for wakeup, reward in zip(wakeups, [one for group in rewards for one in group], strict=False):
        claim = world.must_claim(world.sample(world.prepare(wakeup), version=version))
        with world.database.begin() as conn:
            shaped = {"length_penalty": -0.1 * wakeup.episode_id} if parts else {}
            episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=reward, reward_parts=shaped)


def take(world: World, *, version_in: int = 0) -> Take:
    train = world.run.config.train
    with world.database.begin() as conn:
        return steps.take_groups(
            conn,
            world.run.id,
            version_in=version_in,
            num_groups=train.groups_per_step,
            max_staleness=train.max_staleness,
            max_refills=train.max_refills,
            pass_k=train.pass_k,
        )


def finish(world: World, done: Take) -> None:
    assert done.step is not None
    digest = episode_digest([make_turn(0).sampled.digest])
    with world.database.begin() as conn:
        ids = [e.episode_id for group in steps.load_groups(conn, done.step.id) for e in group.episodes]
        trained = [TrainedEpisode(episode_id=id, digest=digest, advantage=0.0, num_tokens=3) for id in ids]
        steps.finish_step(conn, done.step, published=PUBLISHED, metrics={}, trained=trained)


def group_states(world: World) -> list[str]:
    with world.database.begin() as conn:
        return list(
            conn.execute(
                text("SELECT coalesce(drop_reason, state) FROM episode_group WHERE run_id = :id ORDER BY id"),
                {"id": world.run.id},
            ).scalars()
        )


def test_dropped_groups_free_their_slots_and_exactly_as_many_are_made_again(database: Database):
    world = open_world(database)
    feeder = Feeder(database, unheard)
    assert feeder.round() == 4
    play(world, (1, 1), (0, 1), (0, 0))
    done = take(world)
    assert (done.step, done.dropped) == (None, {DropReason.ZERO_VARIANCE: 2})
    # The finished group and the open one stay; the two that are gone are replaced, once.
    assert group_states(world) == ["zero_variance", "COMPLETE", "zero_variance", "OPEN"]
    assert [feeder.round(), feeder.round()] == [2, 0]
    play(world, (1, 0))
    done = take(world)
    assert done.dropped == {}
    assert group_states(world) == ["zero_variance", "TAKEN", "zero_variance", "TAKEN", "OPEN", "OPEN"]


def test_a_group_that_two_reasons_speak_against_is_dropped_and_replaced_once(database: Database):
    world = open_world(database, max_staleness=0)
    feeder = Feeder(database, unheard)
    assert feeder.round() == 2
    play(world, (1, 1), (0, 0))
    done = take(world, version_in=1)
    assert done.dropped == {DropReason.STALE: 2}
    with database.begin() as conn:
        assert steps.num_refilled(conn, world.run.id, version_in=1) == 0
    assert [feeder.round(), feeder.round()] == [2, 0]


def test_the_raw_reward_decides_whatever_its_parts_say(database: Database):
    """A penalty among the parts gives a group of right answers no variance."""
    world = open_world(database)
    Feeder(database, unheard).round()
    play(world, (1, 1), (1, 0.5), parts=True)
    assert take(world).dropped == {DropReason.ZERO_VARIANCE: 1}


def test_an_episode_that_says_nothing_of_the_policy_gives_no_variance(database: Database):
    world = open_world(database, groups_per_step=1)
    world.run = runs_with_group_size(world, 3)
    Feeder(database, unheard).round()
    lose_the_first(world)
    play(world, (1, 1))
    assert take(world).dropped == {DropReason.ZERO_VARIANCE: 1}


def lose_the_first(world: World) -> None:
    """The oldest episode ends by what is none of the agent's doing."""
    with world.database.begin() as conn:
        first = conn.execute(text("SELECT id FROM episode ORDER BY id LIMIT 1")).scalar_one()
    claim = world.must_claim(episodes.Wakeup(stage=Stage.INIT, episode_id=first, attempt=1))
    with world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.SANDBOX_FAILED, detail="x", afresh=False, max_attempts=1)


def runs_with_group_size(world: World, size: int) -> Run:
    config = world.run.config.model_copy(update={"rollout": RolloutConfig(group_size=size)})
    with world.database.begin() as conn:
        return runs.open_run(conn, config)


def test_with_pass_at_k_a_group_whose_teams_are_all_as_good_is_replaced(database: Database):
    """Of three episodes, one that failed alone is in no team of two that failed."""
    world = open_world(database, group_size=3, groups_per_step=4, advantage="pass_at_k", pass_k=2)
    Feeder(database, unheard).round()
    play(world, (1, 1, 0), (1, 0, 0), (0, 0, 0), (0.5, 0, 1))
    assert take(world).dropped == {DropReason.ZERO_VARIANCE: 2}
    assert group_states(world)[:4] == ["zero_variance", "COMPLETE", "zero_variance", "COMPLETE"]


def test_with_pass_at_k_a_group_with_no_more_than_k_episodes_of_the_agent_is_replaced(database: Database):
    world = open_world(database, group_size=3, groups_per_step=1, advantage="pass_at_k", pass_k=2)
    Feeder(database, unheard).round()
    lose_the_first(world)
    play(world, (1, 0), (1, 0, 0))
    done = take(world)
    assert (done.dropped, done.num_zero_variance) == ({DropReason.ZERO_VARIANCE: 1}, 0)
    finish(world, done)
    with database.begin() as conn:
        assert audit.violations(conn, world.run.id)["dropped_fresh"] == 0
        conn.execute(text("UPDATE run SET config = jsonb_set(config, '{train,pass_k}', 'null')"))
        assert audit.violations(conn, world.run.id)["dropped_fresh"] == 1


def test_by_default_they_are_trained(database: Database):
    world = open_world(database, zero_variance="train")
    Feeder(database, unheard).round()
    play(world, (1, 1), (0, 0))
    done = take(world)
    assert (done.dropped, done.num_zero_variance, done.step is not None) == ({}, 0, True)


def test_a_policy_that_has_solved_everything_comes_to_an_end(database: Database):
    """At most three groups are replaced for a version; then groups without variance are trained, and counted."""
    world = open_world(database, max_refills_per_step=3, max_staleness=0)
    feeder = Feeder(database, unheard)
    trained, dropped = [], []
    for version in range(3):
        serve(database, world.run, version)
        dropped.append(0)
        for _ in range(10):
            feeder.round()
            play(world, (1, 1), (1, 1), version=version)
            done = take(world, version_in=version)
            dropped[-1] += done.dropped[DropReason.ZERO_VARIANCE]
            if done.step is not None:
                break
        finish(world, done)
        trained.append(done.num_zero_variance)
    assert (trained, dropped) == ([2, 2, 2], [3, 3, 3])
    assert feeder.round() == 0
    with database.begin() as conn:
        runs.finish(conn, world.run.id)
        assert {name: num for name, num in audit.violations(conn, world.run.id).items() if num} == {}
        found = report.summary(conn, world.run.id)
        assert found.groups_dropped == {DropReason.ZERO_VARIANCE: 9}
        assert (found.episodes_dropped_zero_variance, found.episodes_trained, found.episodes_lost) == (18, 12, 0)
        assert len(group_states(world)) == 3 * 2 + 9


def test_the_trainer_takes_groups_without_variance_once_its_refills_are_used_up(
    database: Database, caplog: pytest.LogCaptureFixture
):
    world = open_world(database, max_refills_per_step=1)
    with database.begin() as conn:
        versions.publish(conn, world.run.id, 0, PUBLISHED)
    Feeder(database, unheard).round()
    play(world, (1, 1), (1, 1), (0, 1))
    work = wait_for_work(database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    assert [[episode.reward for episode in group.episodes] for group in work.groups] == [[1, 1], [0, 1]]
    assert group_states(world) == ["zero_variance", "TAKEN", "TAKEN", "OPEN"]
    assert "training groups without variance run=1 version=0 count=1" in caplog.text


@pytest.mark.parametrize("damage", ["UPDATE run SET config = jsonb_set(config, '{train,zero_variance}', '\"train\"')",
                                    "UPDATE episode SET reward = 0 WHERE id = 1"])  # fmt: skip
def test_the_audit_finds_a_group_that_was_dropped_without_need(database: Database, damage: str):
    world = open_world(database)
    Feeder(database, unheard).round()
    play(world, (1, 1), (1, 0), (1, 0))
    done = take(world)
    finish(world, done)
    with database.begin() as conn:
        assert audit.violations(conn, world.run.id)["dropped_fresh"] == 0
        conn.execute(text(damage))
        assert audit.violations(conn, world.run.id)["dropped_fresh"] == 1


def test_a_feeder_that_is_killed_at_any_point_neither_skips_nor_repeats_a_task_of_either_run(database: Database):
    """Two runs, groups that are replaced, and feeders that die before the commit, or before anything is sent."""
    worlds = [open_world(database, name=name, num_versions=9, num_tasks=5) for name in ("run-a", "run-b")]
    fates = []
    for number in range(9):
        if number % 3 == 0:
            fates.append(die_before_the_commit(database))
        elif number % 3 == 1:
            with pytest.raises(KeyboardInterrupt):
                Feeder(database, die_before_sending, max_episodes_in_flight=12).round()
        else:
            Feeder(database, unheard, max_episodes_in_flight=12).round()
        for world in worlds:
            play(world, (1, 1), (1, 0))
            take(world)
    assert fates == ["died"] * 3
    for world in worlds:
        assert "zero_variance" in group_states(world)
        assert_tasks_in_order(world)


def die_before_sending(_: object) -> None:
    raise KeyboardInterrupt


def die_before_the_commit(database: Database) -> str:
    """A round whose connection ends in the middle of making groups."""

    def attempt() -> str:
        try:
            Feeder(database, unheard, max_episodes_in_flight=12).round()
        except DatabaseUnavailable:
            return "died"
        return "lived"

    with ThreadPoolExecutor(1) as pool, database.begin() as conn:
        conn.execute(text("LOCK TABLE episode_event IN SHARE MODE"))
        dying = pool.submit(attempt)
        deadline = time.monotonic() + 20
        while not dying.done() and time.monotonic() < deadline:
            with database.begin() as other:
                other.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                        " AND datname = current_database()"
                    )
                )
            time.sleep(0.02)
        return dying.result(1)


def assert_tasks_in_order(world: World) -> None:
    with world.database.begin() as conn:
        query = text("SELECT task_id FROM episode_group WHERE run_id = :id ORDER BY id")
        played = list(conn.execute(query, {"id": world.run.id}).scalars())
        dataset = conn.execute(text("SELECT dataset FROM run WHERE id = :id"), {"id": world.run.id}).scalar_one()
        task_ids = tasks.ids(conn, dataset)
        cursor = runs.lock_cursor(conn, world.run.id)
    assert len(played) > len(task_ids)
    assert next_tasks(task_ids, DataCursor(epoch=0, index=0), num=len(played), seed=world.run.config.seed) == (
        played,
        cursor,
    )
