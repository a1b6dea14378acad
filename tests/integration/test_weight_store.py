"""Versions on their way from a store to engines, and which of them may be deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy import text

from common.db import engines, runs, turns, versions
from common.db.session import Database
from common.db.versions import PolicyVersion
from common.errors import SetupError
from common.object_store import ObjectStore
from common.weights import Published, WeightsUnavailable
from tests.integration import test_trainer, test_weight_keeper
from tests.integration.test_weight_keeper import LOAD, Scene
from tests.integration.trained import newest, play, wait_for_version
from tests.integration.world import World, make_turn, make_world
from tests.unit.workers.waiting import until
from tests.version_files import writing
from trainer.loop import NUM_KEPT, Trainer
from trainer.source import wait_for_work
from workers.scripted_engine import Fault, ScriptedEngine

start_folder = test_trainer.start_folder
new_trainer = test_trainer.new_trainer
scene = test_weight_keeper.scene
engine = test_weight_keeper.engine
NewTrainer = Callable[[], Trainer]


@pytest.fixture
def bucket() -> Iterator[ObjectStore]:
    yield ObjectStore("memory://bucket")
    MemoryFileSystem.store.clear()


def publish(database: Database, run: runs.Run, store: ObjectStore, number: int) -> Published:
    published = store.publish(run.name, number, writing("model.bin", b"w" * (number + 1)))
    with database.begin() as conn:
        versions.publish(conn, run.id, number, published)
    return published


def objects_of(published: Published) -> str:
    return published.location.removeprefix("memory:/")


async def until_loaded(scene: Scene, engine: ScriptedEngine, number: int) -> Path:
    await until(lambda: scene.stored(engine).version == number)
    assert (scene.stored(engine).state, scene.stored(engine).loading) == ("SERVING", None)
    assert engine.weights is not None
    return engine.weights


async def test_a_version_in_a_bucket_is_fetched_before_the_engine_is_paused(
    scene: Scene, engine: ScriptedEngine, bucket: ObjectStore
) -> None:
    cached = scene.store.root / "cache"
    engine.accept = lambda path: None if (path / "model.bin").read_bytes() == b"w" * 3 else "not whole"
    publish(scene.database, scene.run, bucket, 2)
    async with scene.keeping():
        folder = await until_loaded(scene, engine, 2)
    assert folder.parent == cached
    assert folder.name.startswith("000002-")
    assert engine.version == "run-a/000002"


async def test_a_bucket_that_is_away_is_asked_again_and_no_engine_is_to_blame(
    scene: Scene, engine: ScriptedEngine, bucket: ObjectStore
) -> None:
    publish(scene.database, scene.run, bucket, 0)
    async with scene.keeping():
        await until_loaded(scene, engine, 0)
        with scene.database.begin() as conn:
            lost = Published(location="nowhere://bucket/run-a/000001-00", manifest_sha256="0" * 64)
            versions.publish(conn, scene.run.id, 1, lost)
        await until(lambda: "Protocol not known: nowhere" in (scene.stored(engine).error or ""))
        stored = scene.stored(engine)
        assert (stored.version, stored.state, stored.failures, stored.loading) == (0, "SERVING", 0, None)
        assert not engine.paused
        publish(scene.database, scene.run, bucket, 1)
        await until_loaded(scene, engine, 1)


async def test_an_object_that_is_missing_is_named_and_the_old_weights_serve_on(
    scene: Scene, engine: ScriptedEngine, bucket: ObjectStore
) -> None:
    publish(scene.database, scene.run, bucket, 0)
    async with scene.keeping():
        await until_loaded(scene, engine, 0)
        engine.calls.clear()
        broken = bucket.publish(scene.run.name, 1, writing("model.bin", b"x"))
        MemoryFileSystem().rm_file(objects_of(broken) + "/model.bin")
        with scene.database.begin() as conn:
            versions.publish(conn, scene.run.id, 1, broken)
        await until(lambda: "model.bin is missing" in (scene.stored(engine).error or ""))
        assert "/pause" not in engine.calls
        assert scene.stored(engine).failures == 0
        bucket.publish(scene.run.name, 1, writing("model.bin", b"x"))
        await until_loaded(scene, engine, 1)


async def test_a_version_that_is_being_loaded_is_not_pruned_under_the_keeper(
    scene: Scene, engine: ScriptedEngine
) -> None:
    scene.publish(1)
    engine.fail_next(LOAD, Fault.HANG)
    async with scene.keeping():
        await until(lambda: LOAD in engine.calls)
        for number in range(2, 6):
            scene.publish(number)
        with scene.database.begin() as conn:
            needed = versions.needed(conn, scene.run.id)
        assert needed == {1}
        assert scene.store.prune(scene.run.name, keep_from=5, keep=needed) == [2, 3, 4]
        await engine.restart()
        await scene.until_serving(engine, 5)
    with scene.database.begin() as conn:
        assert versions.needed(conn, scene.run.id) == {5}


def test_versions_of_engines_and_of_episodes_that_go_on_are_needed(database: Database) -> None:
    world = make_world(database)
    with database.begin() as conn:
        engines.own(conn, "keeper", lease_s=60)
        engine_id = conn.execute(text("SELECT id FROM engine")).scalar_one()
        engines.serves(conn, engine_id, owner="keeper", version=3)
        engines.starts_loading(conn, engine_id, owner="other", version=8)
        assert versions.needed(conn, world.run.id) == {3}, "only its keeper says what an engine loads"
        engines.starts_loading(conn, engine_id, owner="keeper", version=9)
    playing, sampled = world.feed(1)
    claim = world.must_claim(world.prepare(playing))
    with database.begin() as conn:
        turns.save(conn, claim, make_turn(0, version=5))
    to_score = world.sample(world.prepare(sampled), version=4)
    with database.begin() as conn:
        assert versions.needed(conn, world.run.id) == {3, 4, 5, 9}
    world.score(to_score)
    with database.begin() as conn:
        engines.loaded(conn, engine_id, owner="keeper", version=9)
        assert versions.needed(conn, world.run.id) == {5, 9}
        assert versions.needed(conn, world.run.id + 1) == frozenset()


def test_files_that_engines_of_any_run_need_are_loadable(database: Database) -> None:
    world = make_world(database)
    published = [Published(location=f"memory://b/{number}", manifest_sha256=str(number) * 64) for number in range(4)]
    with database.begin() as conn:
        for number, version in enumerate(published):
            versions.publish(conn, world.run.id, number, version)
        engines.own(conn, "keeper", lease_s=60)
        engine_id = conn.execute(text("SELECT id FROM engine")).scalar_one()
        engines.serves(conn, engine_id, owner="keeper", version=1)
        engines.starts_loading(conn, engine_id, owner="keeper", version=3)
        assert {version.number for version in versions.loadable(conn)} == {1, 3}


@pytest.fixture
def world(database: Database, start_folder: Path) -> World:
    return test_trainer.world.__wrapped__(database, start_folder)  # type: ignore[attr-defined]


def train(world: World, trainer: Trainer, *, num_steps: int) -> PolicyVersion:
    version = trainer.resume()
    for number in range(version, version + num_steps):
        play(world, replace(wait_for_version(world, number), location=str(world.run.config.model)))
        work = wait_for_work(world.database, world.run, version=number, stop=threading.Event(), look_up=lambda: None)
        assert work is not None
        assert trainer.train_step(work, threading.Event())
    return wait_for_version(world, version + num_steps)


def numbers_in(version: PolicyVersion) -> list[int]:
    """All that lie beside it."""
    return sorted(int(entry.name) for entry in version.path.parent.iterdir())


def test_the_trainer_keeps_the_newest_versions_and_what_an_engine_serves(
    world: World, new_trainer: NewTrainer, tmp_path: Path
) -> None:
    with world.database.begin() as conn:
        conn.execute(text("UPDATE engine SET version = 1"))
    last = train(world, new_trainer(), num_steps=5)
    assert world.run.config.train.max_staleness + NUM_KEPT == 3
    assert sorted(entry.name for entry in last.path.parent.iterdir()) == [
        "000000",
        "000001",
        "000003",
        "000004",
        "000005",
    ]
    assert new_trainer().resume() == 5


def test_versions_can_be_kept_for_good(world: World, new_trainer: NewTrainer) -> None:
    kept = world.run.config.train.model_copy(update={"keep_version_every": 2})
    run = replace(world.run, stored=world.run.config.model_copy(update={"train": kept}))
    last = train(world, replace(new_trainer(), run=run), num_steps=5)
    assert sorted(entry.name for entry in last.path.parent.iterdir()) == [
        "000000",
        "000002",
        "000003",
        "000004",
        "000005",
    ]


def test_a_trainer_publishes_into_a_bucket_and_goes_on_from_there(
    world: World, new_trainer: NewTrainer, bucket: ObjectStore
) -> None:
    trainer = replace(new_trainer(), weights=bucket)
    last = train(world, trainer, num_steps=2)
    assert last.location.startswith("memory://bucket/run-a/000002-")
    bucket.check(last.location, last.manifest_sha256)
    MemoryFileSystem().rm(objects_of(Published(location=last.location, manifest_sha256="")), recursive=True)
    assert replace(new_trainer(), weights=bucket).resume() == 2
    assert newest(world) == last, "the same weights, published again at the same place"
    bucket.check(last.location, last.manifest_sha256)


class Flaky(ObjectStore):
    """Is away for a number of publications."""

    num_away = 0

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        if self.num_away:
            self.num_away -= 1
            raise WeightsUnavailable("memory://bucket cannot be reached")
        return super().publish(run, number, write)


def test_a_step_outlasts_a_bucket_that_goes_away_within_it(
    world: World, new_trainer: NewTrainer, bucket: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = Flaky("memory://bucket")
    trainer = replace(new_trainer(), weights=store, outage_wait_s=0.5)
    trainer.resume()
    store.num_away = 1
    train(world, trainer, num_steps=1)
    assert "weight store away, trying for" in caplog.text
    store.num_away = 99
    with pytest.raises(SetupError, match="the weight store is away for 0 s: memory://bucket cannot be reached"):
        train(world, trainer, num_steps=1)
    store.num_away = 0
    assert train(world, replace(new_trainer(), weights=store), num_steps=1).number == 2
