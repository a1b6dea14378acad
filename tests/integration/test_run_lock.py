"""A run has one trainer: a second one is refused before it touches anything, and so is one that lost its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from common.db import step_troubles
from common.db.run_lock import RunLock, RunTaken
from common.errors import SetupError
from common.weights import WeightStore
from tests.integration import test_trainer
from tests.integration.trained import database_away, play, wait_for_version
from tests.integration.world import World
from trainer.failures import noting_failures, outlast_outage
from trainer.loop import Trainer
from trainer.source import Work, wait_for_work

start_folder = test_trainer.start_folder
world = test_trainer.world
new_trainer = test_trainer.new_trainer
NewTrainer = Callable[[], Trainer]


@pytest.fixture
def other(world: World) -> Iterator[RunLock]:
    """The lock as another trainer has it, or wants it; it does not wait."""
    with closing(RunLock(world.database, world.run, wait_s=0)) as lock:
        yield lock


def files(trainer: Trainer) -> dict[Path, bytes]:
    """All that lies in the trainer's folders, drafts too."""
    assert isinstance(trainer.weights, WeightStore)
    folders = (trainer.weights.root, trainer.checkpoints.path(0).parent)
    return {file: file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()}


def take(world: World) -> Work:
    """Groups for the step of version 0."""
    play(world, wait_for_version(world, 0))
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    return work


def test_second_trainer_is_refused_before_it_deletes_what_the_first_is_writing(
    world: World, new_trainer: NewTrainer, other: RunLock
) -> None:
    first = new_trainer()
    first.resume()
    draft = first.checkpoints.path(1).parent / ".draft-000001-x"
    draft.mkdir(parents=True)
    (draft / "half").write_bytes(b"x")
    before = files(first)
    with pytest.raises(
        RunTaken, match=r"run run-a has another trainer: 'rollmill trainer \d+@.*backend \d+ .*Start one trainer"
    ):
        replace(first, lock=other).resume()
    assert files(first) == before


def test_trainer_waits_for_the_one_before_to_end(world: World, new_trainer: NewTrainer, other: RunLock) -> None:
    other.hold()
    with ThreadPoolExecutor(1) as executor:
        resuming = executor.submit(new_trainer().resume)
        with pytest.raises(TimeoutError):
            resuming.result(timeout=0.5)
        other.close()
        assert resuming.result(timeout=60) == 0


def test_runs_have_locks_of_their_own(world: World, other: RunLock) -> None:
    other.hold()
    with RunLock(world.database, replace(world.run, id=world.run.id + 1), wait_s=0) as lock:
        assert lock.hold()


def test_lock_that_went_with_its_connection_is_taken_again_before_the_step_is_written(
    world: World, new_trainer: NewTrainer, other: RunLock, postgres_url: str
) -> None:
    trainer = new_trainer()
    trainer.resume()
    work = take(world)
    with database_away(world.database, postgres_url):
        pass
    assert trainer.train_step(work, threading.Event())
    with pytest.raises(RunTaken):
        other.hold()


def test_trainer_whose_place_was_taken_writes_nothing(
    world: World, new_trainer: NewTrainer, other: RunLock, postgres_url: str
) -> None:
    trainer = replace(new_trainer(), lock=RunLock(world.database, world.run, wait_s=0))
    trainer.resume()
    work, before = take(world), files(trainer)
    with database_away(world.database, postgres_url):
        pass
    outlast_outage(other.hold, stop=threading.Event(), limit_s=60)
    with pytest.raises(RunTaken, match="run run-a has another trainer"), noting_failures(world.database, work.step):
        trainer.train_step(work, threading.Event())
    with pytest.raises(RunTaken):
        trainer.look_up()
    assert files(trainer) == before
    with world.database.begin() as conn:
        assert step_troubles.find(conn, world.run.id) is None, "the step is the other trainer's"


def test_trainer_whose_step_another_has_finished_writes_nothing(world: World, new_trainer: NewTrainer) -> None:
    late = new_trainer()
    late.resume()
    work = take(world)
    first = new_trainer()
    assert first.resume() == 0
    assert first.train_step(work, threading.Event())
    first.lock.close()
    before = files(late)
    with pytest.raises(SetupError, match="another trainer has finished it"):
        late.train_step(work, threading.Event())
    assert files(late) == before
