"""A run that is given more versions: it goes on where it stood, whoever is at work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import Connection, text

from common.config import EvalConfig, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import evaluations, run_control, runs, sharing, versions
from common.db.run_lock import RunLock
from common.db.runs import Run
from common.episode import RunState
from common.errors import SetupError
from common.weights import Published
from tests.integration import test_trainer
from tests.integration.conftest import Answer
from tests.integration.test_cancel import wait_until_blocked
from tests.integration.trained import NO_BROKER, play, wait_for_version
from tests.integration.world import World
from trainer.loop import make_trainer

start_folder = test_trainer.start_folder
world = test_trainer.world
PUBLISHED = Published(location="/nowhere", manifest_sha256="0" * 64)


def stored(conn: Connection, name: str = "run-a") -> tuple[RunState, int]:
    run = runs.require(conn, name)
    return run.state, run.config.train.num_versions


def with_versions(config: RunConfig, num_versions: int) -> RunConfig:
    return config.model_copy(
        update={"train": config.train.model_copy(update={"num_versions": num_versions, "warmup_steps": 0})}
    )


def train(world: World, run: Run, *, data_dir: Path, versions: range) -> float:
    """Train the run by a trainer of its own to its end; the last step's learning rate."""
    lock, stop = RunLock(world.database, run), threading.Event()
    trainer = make_trainer(run, world.database, data_dir=data_dir, broker_url=NO_BROKER, lock=lock)
    with closing(lock), ThreadPoolExecutor(1) as executor:
        training = executor.submit(trainer.train, stop)
        try:
            for number in versions:
                play(world, wait_for_version(world, number))
            assert training.result(timeout=60)
        finally:
            stop.set()
    with world.database.begin() as conn:
        rate: float = conn.execute(
            text("SELECT metrics -> 'learning_rate' FROM train_step ORDER BY version_in DESC LIMIT 1")
        ).scalar_one()
    return rate


def test_a_finished_run_goes_on_from_its_checkpoint_to_the_new_end(
    world: World, rollmill: Callable[..., Answer], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    two, three = (with_versions(world.run.config, num) for num in (2, 3))
    with world.database.begin() as conn:
        run = runs.open_run(conn, two)
    full = two.train.learning_rate
    assert train(world, run, data_dir=tmp_path, versions=range(2)) == pytest.approx(full / 2)
    with pytest.raises(SetupError) as refused, world.database.begin() as conn:
        runs.open_run(conn, three)
    assert str(refused.value) == (
        "run run-a exists with another configuration: train.num_versions 2 -> 3. "
        "`rollmill run extend run-a --versions 3` trains it further"
    )
    assert rollmill("run", "extend", "run-a", "--versions", "3") == (
        0,
        "run run-a now ends with version 3 in place of 2: set train.num_versions = 3 in its file, and start it, or "
        "start it again\n",
    )
    with world.database.begin() as conn:
        assert stored(conn) == (RunState.ACTIVE, 3)
        assert conn.execute(text("SELECT finished_at FROM run")).scalar_one() is None
        run = runs.open_run(conn, three)
    assert train(world, run, data_dir=tmp_path, versions=range(2, 3)) == pytest.approx(full / 2)
    with world.database.begin() as conn:
        assert stored(conn) == (RunState.FINISHED, 3)


def test_the_feeder_has_room_for_the_further_groups_at_once(world: World) -> None:
    with world.database.begin() as conn:
        run = runs.open_run(conn, with_versions(world.run.config, 1))
        versions.publish(conn, run.id, 0, PUBLISHED)
        conn.execute(text("UPDATE engine SET version = 0, run_id = :id"), {"id": run.id})
    for wakeup in world.feed(2):
        world.finish(wakeup)
    with world.database.begin() as conn:
        assert sharing.demand(conn, sharing.loads(conn)[0], fed=True).room == 0
        assert run_control.extend(conn, "run-a", num_versions=2) == 1
        assert sharing.demand(conn, sharing.loads(conn)[0], fed=True).room == 2


def test_a_trainer_that_was_started_before_does_not_finish_the_run(world: World, tmp_path: Path) -> None:
    with world.database.begin() as conn:
        run = runs.open_run(conn, with_versions(world.run.config, 1))
    trainer = make_trainer(
        run, world.database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(world.database, run)
    )
    with ThreadPoolExecutor(1) as executor:
        training = executor.submit(trainer.train, threading.Event())
        start = wait_for_version(world, 0)
        with world.database.begin() as conn:
            run_control.extend(conn, "run-a", num_versions=2)
        play(world, start)
        with pytest.raises(SetupError, match="extended to 2 versions after its trainer was started for 1"):
            training.result(timeout=60)
    with world.database.begin() as conn:
        assert stored(conn) == (RunState.ACTIVE, 2)


def test_finishing_and_extending_at_once_leave_a_run_that_goes_on(world: World) -> None:
    """Whichever is first: a run that says it is finished has all of its versions."""
    with ThreadPoolExecutor(1) as executor:
        with world.database.begin() as conn:
            runs.check_end(conn, world.run)
            runs.finish(conn, world.run.id)
            extending = executor.submit(lambda: extend(world))
            wait_until_blocked(world.database)
        assert extending.result(timeout=60) == 3
    with world.database.begin() as conn:
        assert stored(conn) == (RunState.ACTIVE, 4)
    with pytest.raises(SetupError, match="was extended to 4 versions"), world.database.begin() as conn:
        runs.check_end(conn, world.run)


def extend(world: World) -> int:
    with world.database.begin() as conn:
        return run_control.extend(conn, "run-a", num_versions=4)


def test_an_extension_that_is_not_committed_changes_nothing(world: World) -> None:
    with world.database.begin() as conn:
        runs.finish(conn, world.run.id)
    with world.database.engine.connect() as conn:
        run_control.extend(conn, "run-a", num_versions=4)
        assert stored(conn) == (RunState.ACTIVE, 4)
    with world.database.begin() as conn:
        assert stored(conn) == (RunState.FINISHED, 3)


def test_the_new_last_version_is_evaluated_and_the_old_one_is_done(world: World) -> None:
    config = with_versions(world.run.config, 3).model_copy(update={"eval": EvalConfig(every_versions=10)})
    with world.database.begin() as conn:
        run = runs.open_run(conn, config)
        versions.publish(conn, run.id, 3, PUBLISHED)
        evaluations.close(conn, run.id, 3)
        runs.finish(conn, run.id)
        run_control.extend(conn, "run-a", num_versions=5)
        for number in (4, 5):
            versions.publish(conn, run.id, number, PUBLISHED)
        points = conn.execute(text("SELECT version, finished_at IS NULL FROM evaluation_point ORDER BY version")).all()
    assert [tuple(point) for point in points] == [(3, False), (5, True)]


def test_what_cannot_be_extended_is_refused_with_the_reason(world: World) -> None:
    evaluation = replace(world.run).config.model_copy(
        update={"name": "run-e", "train": TrainConfig(num_versions=0), "eval": EvalConfig()}
    )
    with world.database.begin() as conn:
        runs.open_run(conn, evaluation)
        stopped = RunConfig(name="run-s", model=Path("model"), rollout=RolloutConfig(group_size=2))
        runs.open_run(conn, stopped)
        run_control.stop(conn, "run-s", why="enough")
        run_control.pause(conn, "run-a")
    for name, num, why in (
        ("run-a", 3, "run run-a has 3 versions already: --versions 3 is not more"),
        ("run-e", 3, "run run-e trains nothing"),
        ("run-s", 99, "run run-s is stopped, and stays so"),
        ("run-z", 99, "no run run-z"),
    ):
        with pytest.raises(SetupError, match=why), world.database.begin() as conn:
            run_control.extend(conn, name, num_versions=num)
    with world.database.begin() as conn:
        run_control.extend(conn, "run-a", num_versions=4)
        assert stored(conn) == (RunState.PAUSED, 4)
