"""A trainer in trouble: a database that goes away in the middle of a step, and steps that fail again and again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from common.db import report, run_control, runs, snapshot, step_troubles
from common.db.session import Database
from common.errors import DatabaseUnavailable, SetupError
from common.weights import Published, WeightStore
from deploy.status import status_table
from tests.integration import test_trainer
from tests.integration.trained import database_away, newest, play, wait_for_version
from tests.integration.world import World
from trainer.loop import Trainer
from trainer.source import wait_for_work

start_folder = test_trainer.start_folder
world = test_trainer.world
new_trainer = test_trainer.new_trainer
NewTrainer = Callable[[], Trainer]


class GatedWeights(WeightStore):
    """Waits, with a trained version written, until it may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written = threading.Event()
        self.may_go_on = threading.Event()

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        published = super().publish(run, number, write)
        if number > 0:
            self.written.set()
            assert self.may_go_on.wait(60)
        return published


class LosingAnswers(Database):
    """Commits like any other, and then may lose the connection before it can say so."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.engine)
        self.num_to_lose = 0

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with super().begin() as conn:
            yield conn
        if self.num_to_lose:
            self.num_to_lose -= 1
            raise DatabaseUnavailable("server closed the connection unexpectedly")


@contextmanager
def away_within_a_step(
    world: World, trainer: Trainer, server_url: str, stop: threading.Event
) -> Iterator[Future[bool]]:
    """A trainer at work on the run; inside the block the database is away, and the step that it trains not committed.

    Left on its own, the trainer then waits for the groups of the next step; `stop` is set after the block.
    """
    assert isinstance(trainer.weights, WeightStore)
    weights = GatedWeights(trainer.weights.root)
    with ThreadPoolExecutor(1) as executor:
        training = executor.submit(replace(trainer, weights=weights).train, stop)
        try:
            play(world, wait_for_version(world, 0))
            assert weights.written.wait(60)
            with database_away(world.database, server_url):
                weights.may_go_on.set()
                yield training
            if not training.done() and not stop.is_set():
                wait_for_version(world, 1)
        finally:
            stop.set()
            weights.may_go_on.set()


def wait_for_log(caplog: pytest.LogCaptureFixture, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in caplog.text:
        assert time.monotonic() < deadline, f"not logged: {words}"
        time.sleep(0.02)


def num_trained(world: World) -> int:
    with world.database.begin() as conn:
        figures = report.summary(conn, world.run.id)
    assert figures.episodes_trained_twice == 0
    return figures.episodes_trained


def test_step_outlasts_a_database_that_goes_away_within_it(
    world: World, new_trainer: NewTrainer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    with away_within_a_step(world, new_trainer(), postgres_url, stop) as training:
        wait_for_log(caplog, "database away, trying for")
        assert not training.done()
    assert training.result(timeout=60) is False, "told to stop after the step"
    assert num_trained(world) == 4


def test_database_that_stays_away_ends_the_trainer_with_one_line_and_the_step_is_replayed(
    world: World, new_trainer: NewTrainer, postgres_url: str
) -> None:
    impatient = replace(new_trainer(), outage_wait_s=0.1)
    with (
        away_within_a_step(world, impatient, postgres_url, threading.Event()) as training,
        pytest.raises(SetupError, match=r"^the database is away for 0 s: .*replays a step that is open$"),
    ):
        training.result(timeout=60)
    assert num_trained(world) == 0
    replay(world, new_trainer())
    assert num_trained(world) == 4


def test_stop_while_the_database_is_away_ends_the_trainer_at_once(
    world: World, new_trainer: NewTrainer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    with away_within_a_step(world, new_trainer(), postgres_url, stop) as training:
        wait_for_log(caplog, "database away, trying for")
        stop.set()
        assert training.result(timeout=10) is False
    with world.database.begin() as conn:
        assert step_troubles.find(conn, world.run.id) is None, "a database that is away is no fault of the step"


def test_commit_whose_answer_is_lost_trains_nothing_twice(world: World, new_trainer: NewTrainer) -> None:
    database = LosingAnswers(world.database)
    trainer = replace(new_trainer(), database=database)
    trainer.resume()
    play(world, wait_for_version(world, 0))
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    database.num_to_lose = 1
    assert trainer.train_step(work, threading.Event()) is True
    assert database.num_to_lose == 0
    assert num_trained(world) == 4
    version = newest(world)
    assert version is not None
    assert version.number == 1


def replay(world: World, trainer: Trainer) -> None:
    assert trainer.resume() == 0
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    assert trainer.train_step(work, threading.Event()) is True


def spoil(world: World) -> None:
    """Groups to train, one reward of which no loss can be computed."""
    play(world, wait_for_version(world, 0))
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET reward = 1e300 WHERE id = (SELECT min(id) FROM episode)"))


def shown(world: World) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_table(world.database))
    return capture.get()


def test_step_that_fails_is_named_and_given_up_the_third_time(world: World, new_trainer: NewTrainer) -> None:
    new_trainer().resume()
    spoil(world)
    for times in (1, 2):
        with pytest.raises(ValueError, match="reward must be a finite number from"):
            new_trainer().train(threading.Event())
        with world.database.begin() as conn:
            trouble = snapshot.take_snapshot(conn, world.run.id).step_trouble
            assert trouble == report.summary(conn, world.run.id).step_trouble
        assert trouble is not None
        assert (trouble.version_in, trouble.failures, trouble.is_final) == (0, times, False)
        assert re.fullmatch(r"ValueError: group \d+ episode \d+: reward must be .*, got 1e\+300", trouble.error)
    with pytest.raises(SetupError, match=r"^training step from version 0 failed 3 times: \w+: .*mend the cause"):
        new_trainer().train(threading.Event())
    with world.database.begin() as conn:
        runs.note_error(conn, world.run.id, None)
        trouble = step_troubles.find(conn, world.run.id)
    assert trouble is not None, "the feeder, which has no trouble, says nothing of the trainer's"
    assert trouble.is_final
    assert f"run-a: {trouble}" in shown(world)


def test_mended_step_is_tried_afresh_and_shows_no_trouble_once_it_is_done(
    world: World, new_trainer: NewTrainer
) -> None:
    new_trainer().resume()
    spoil(world)
    with pytest.raises(ValueError, match="reward must be a finite number from"):
        new_trainer().train(threading.Event())
    with world.database.begin() as conn:
        step_troubles.forget(conn, world.run.id)
        assert step_troubles.find(conn, world.run.id) is None
        conn.execute(text("UPDATE episode SET reward = 1 WHERE reward > 1"))
    replay(world, new_trainer())
    assert num_trained(world) == 4
    assert "training step" not in shown(world)


def test_trouble_that_a_person_can_mend_is_shown_but_not_counted(
    world: World, new_trainer: NewTrainer, tmp_path: Path
) -> None:
    trainer = new_trainer()
    trainer.resume()
    play(world, wait_for_version(world, 0))
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(SetupError, match="cannot write weights"):
        trainer.train(threading.Event())
    with world.database.begin() as conn:
        trouble = step_troubles.find(conn, world.run.id)
    assert trouble is not None
    assert str(trouble).startswith("training step from version 0 failed: cannot write weights: ")
    assert trouble.failures == 0


def test_trainer_that_is_killed_in_a_step_again_and_again_is_shown(world: World, new_trainer: NewTrainer) -> None:
    new_trainer().resume()
    play(world, wait_for_version(world, 0))
    for begun in range(5):
        with world.database.begin() as conn:
            trouble = step_troubles.find(conn, world.run.id)
        assert (trouble is None) == (begun < 4)
        taken = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
        assert taken is not None
    assert trouble is not None
    assert str(trouble).startswith(
        "training step from version 0 failed: the trainer ended in it 3 times without a word"
    )
    assert not trouble.is_final, "who killed it may have had a reason of their own"
    assert "killed, say for its memory" in shown(world)
    with world.database.begin() as conn:
        step_troubles.forget(conn, world.run.id)
        assert step_troubles.find(conn, world.run.id) is None


def test_long_error_is_shown_in_short(world: World, new_trainer: NewTrainer) -> None:
    trainer = new_trainer()
    trainer.resume()
    play(world, wait_for_version(world, 0))
    with world.database.begin() as conn:
        conn.execute(text("ALTER TABLE trained_episode ADD CONSTRAINT nothing_is_good CHECK (num_tokens < 0)"))
    with pytest.raises(IntegrityError):
        trainer.train(threading.Event())
    with world.database.begin() as conn:
        trouble = step_troubles.find(conn, world.run.id)
    assert trouble is not None
    assert trouble.error.startswith("IntegrityError: ")
    assert "nothing_is_good" in trouble.error
    assert len(trouble.error) <= 300
    assert "\n" not in trouble.error


def test_stopped_run_still_tells_why_its_step_was_not_trained(world: World, new_trainer: NewTrainer) -> None:
    new_trainer().resume()
    spoil(world)
    with pytest.raises(ValueError, match="reward must be a finite number from"):
        new_trainer().train(threading.Event())
    with world.database.begin() as conn:
        run_control.stop(conn, world.run.name, why="broken reward")
        trouble = report.summary(conn, world.run.id).step_trouble
    assert trouble is not None
    assert trouble.failures == 1
    assert "training step" not in shown(world), "nobody need look after a run that is over"


def test_rewards_of_old_rows_are_reported_without_overflow(world: World, new_trainer: NewTrainer) -> None:
    new_trainer().resume()
    spoil(world)
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET reward = 1.7e308 WHERE state = 'SCORED'"))
        assert report.summary(conn, world.run.id).mean_reward_by_version == (1e6, None, None)
        assert [row.mean_reward for row in snapshot.take_snapshot(conn, world.run.id).rewards] == [1e6]
        row = conn.execute(text("SELECT mean_reward, std_reward FROM reward_by_version")).one()
    assert tuple(row) == (1e6, 0.0)
