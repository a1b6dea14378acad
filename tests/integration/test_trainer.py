"""The trainer on a real database: every group is trained once, whatever happens between taking it and the commit."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from common.config import RolloutConfig, RunConfig
from common.config_tracking import TrackingConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, report, run_control, runs, steps, tasks
from common.db.run_lock import RunLock
from common.db.session import Database
from common.db.versions import PolicyVersion
from common.episode import (
    EpisodeState,
    RunState,
)
from common.errors import DatabaseUnavailable, SetupError
from common.outcomes import Outcome
from common.weights import WeightStore, verify
from tests.integration.trained import NO_BROKER, database_away, newest, play, wait_for_version
from tests.integration.world import World
from trainer.checkpoint import STATE_FILE
from trainer.loop import Trainer, make_trainer
from trainer.source import wait_for_work
from trainer.tiny import make_model, save_model
from trainer.tracking import SinkThread, Tracker


@pytest.fixture(scope="module")
def start_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("start")
    save_model(make_model(eos_id=2, pad_id=0, seed=0), folder)
    return folder


@pytest.fixture
def world(database: Database, start_folder: Path) -> World:
    config = RunConfig(
        name="run-a",
        model=start_folder,
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, num_versions=3),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[(str(i), {}) for i in range(4)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


@pytest.fixture
def new_trainer(world: World, tmp_path: Path) -> Iterator[Callable[[], Trainer]]:
    """A trainer as a new process would make it, when that of the one before is gone."""
    with ExitStack() as gone:

        def make() -> Trainer:
            gone.close()
            trainer = make_trainer(
                world.run,
                world.database,
                data_dir=tmp_path,
                broker_url=NO_BROKER,
                lock=RunLock(world.database, world.run),
            )
            gone.callback(trainer.lock.close)
            return trainer

        yield make


def test_run_is_trained_to_its_last_version(world: World, new_trainer: Callable[[], Trainer]) -> None:
    trainer, stop = new_trainer(), threading.Event()
    thread = threading.Thread(target=trainer.train, args=(stop,), daemon=True)
    thread.start()
    try:
        for number in range(3):
            play(world, wait_for_version(world, number))
        thread.join(timeout=30)
        assert not thread.is_alive()
    finally:
        stop.set()
        thread.join(timeout=30)
    with world.database.begin() as conn:
        done = runs.find(conn, world.run.name)
        figures = report.summary(conn, world.run.id)
        metrics = conn.execute(text("SELECT metrics FROM train_step ORDER BY version_in")).scalars().all()
    assert done is not None
    assert done.state is RunState.FINISHED
    assert (figures.token_mismatches, figures.episodes_trained, figures.lag_max) == (0, 12, 0)
    assert [step["reward_mean"] for step in metrics] == [0.5] * 3
    assert max(step["logprob_gap_max"] for step in metrics) < 1e-4
    assert [step["logprob_gap_tokens"] for step in metrics] == [48] * 3
    last = wait_for_version(world, 3)
    verify(last.path, last.manifest_sha256)


def test_a_step_of_older_episodes_alone_shows_no_gap_to_the_engine(
    world: World, new_trainer: Callable[[], Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trainer.loop")
    trainer = new_trainer()
    trainer.resume()
    play(world, wait_for_version(world, 0), num_groups=4)
    for version in range(2):
        work = wait_for_work(world.database, world.run, version=version, stop=threading.Event(), look_up=lambda: None)
        assert work is not None
        assert trainer.train_step(work, threading.Event())
    shown = [message.split(" gap=")[1].split()[0] for message in caplog.messages if message.startswith("trained run=")]
    assert float(shown[0]) < 1e-4
    assert shown[1:] == ["-"]
    with world.database.begin() as conn:
        found = report.summary(conn, world.run.id)
    assert found.lag_max == 1
    assert found.logprob_gap_max == pytest.approx(float(shown[0]), rel=0.1)


def test_step_that_was_published_but_not_committed_is_replayed_alike(
    world: World, new_trainer: Callable[[], Trainer]
) -> None:
    first = new_trainer()
    first.resume()
    start = wait_for_version(world, 0)
    play(world, start)
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    in_the_way = work.groups[1].episodes[1].episode_id
    with world.database.begin() as conn:
        conn.execute(
            text("INSERT INTO trained_episode VALUES (:id, :step, '', 0, 0)"), {"id": in_the_way, "step": work.step.id}
        )
    with pytest.raises(IntegrityError):
        first.train_step(work, threading.Event())
    assert newest(world) == start
    assert isinstance(first.weights, WeightStore)
    left_behind = (first.weights.path(world.run.name, 1) / "model.safetensors").read_bytes()
    with world.database.begin() as conn:
        conn.execute(text("DELETE FROM trained_episode"))

    second = new_trainer()
    assert second.resume() == 0
    replay = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert replay is not None
    assert replay.step == work.step
    second.train_step(replay, threading.Event())
    published = wait_for_version(world, 1)
    verify(published.path, published.manifest_sha256)
    assert (published.path / "model.safetensors").read_bytes() == left_behind
    with world.database.begin() as conn:
        assert steps.open_step(conn, world.run.id) is None
        assert report.summary(conn, world.run.id).episodes_trained == 4


def one_step(world: World, trainer: Trainer) -> PolicyVersion:
    version = trainer.resume()
    play(world, wait_for_version(world, version))
    work = wait_for_work(world.database, world.run, version=version, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    trainer.train_step(work, threading.Event())
    return wait_for_version(world, version + 1)


def test_restart_goes_on_with_the_same_weights_and_optimizer(world: World, new_trainer: Callable[[], Trainer]) -> None:
    trainer = new_trainer()
    one_step(world, trainer)
    other = new_trainer()
    assert other.resume() == 1
    expected, found = trainer.policy.state(), other.policy.state()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in found)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("when", ["at the next start", "while waiting for groups"])
def test_weights_folder_is_written_again(world: World, new_trainer: Callable[[], Trainer], how: str, when: str) -> None:
    trainer = new_trainer()
    published = one_step(world, trainer)
    if how == "gone":
        shutil.rmtree(published.path)
    else:
        (published.path / "model.safetensors").write_bytes(b"nothing")
    if when == "at the next start":
        assert new_trainer().resume() == 1
    else:
        trainer.ensure_published()
    assert newest(world) == published
    verify(published.path, published.manifest_sha256)


def test_damaged_checkpoint_is_named_and_nothing_is_lost(
    world: World, new_trainer: Callable[[], Trainer], tmp_path: Path
) -> None:
    published = one_step(world, new_trainer())
    trainer = new_trainer()
    state = tmp_path / "checkpoints" / "run-a" / "000001" / STATE_FILE
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(SetupError, match=f"cannot go on: checkpoint {state.parent}: .*{STATE_FILE} has .* no older"):
        trainer.resume()
    assert newest(world) == published


def test_checkpoint_of_another_databases_run_of_this_name_is_refused_and_stays(
    world: World, new_trainer: Callable[[], Trainer], tmp_path: Path
) -> None:
    one_step(world, new_trainer())
    state = tmp_path / "checkpoints" / "run-a" / "000001" / STATE_FILE
    before = state.read_bytes()
    with world.database.begin() as conn:
        conn.execute(text("UPDATE run SET created_at = created_at + interval '1 second'"))
    with pytest.raises(
        SetupError, match=f"^{state.parent} is of run run-a of database postgres.* and this is run run-a"
    ):
        new_trainer().resume()
    assert state.read_bytes() == before


@pytest.mark.parametrize("folder", ["weights", "checkpoints"])
def test_refused_write_is_one_line_and_leaves_the_step_to_be_replayed(
    world: World, new_trainer: Callable[[], Trainer], tmp_path: Path, folder: str
) -> None:
    trainer = new_trainer()
    trainer.resume()
    play(world, wait_for_version(world, 0))
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    shutil.rmtree(tmp_path / folder, ignore_errors=True)
    (tmp_path / folder).write_text("in the way")
    with pytest.raises(SetupError, match=rf"cannot write weights: .*{folder}.* the step is replayed"):
        trainer.train_step(work, threading.Event())
    with world.database.begin() as conn:
        assert steps.open_step(conn, world.run.id) == work.step


def start_process(tmp_path: Path, world: World, database_url: str) -> subprocess.Popen[str]:
    config = tmp_path / "run.toml"
    config.write_text(
        f'name = "run-a"\nmodel = "{world.run.config.model}"\n[rollout]\ngroup_size = 2\n'
        "[train]\ngroups_per_step = 2\nnum_versions = 3\n"
    )
    environment = {
        "ROLLMILL_DATABASE_URL": database_url,
        "ROLLMILL_BROKER_URL": NO_BROKER,
        "ROLLMILL_DATA_DIR": str(tmp_path / "data"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "--config", str(config)],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_while_waiting_ends_it_without_error(world: World, database_url: str, tmp_path: Path) -> None:
    with start_process(tmp_path, world, database_url) as process:
        try:
            wait_for_version(world, 0)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors


def test_finished_run_is_left_alone(world: World, database_url: str, tmp_path: Path) -> None:
    with world.database.begin() as conn:
        runs.finish(conn, world.run.id)
    with start_process(tmp_path, world, database_url) as process:
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert newest(world) is None


def test_waiting_outlasts_a_database_that_goes_away(world: World, postgres_url: str):
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(wait_for_work, world.database, world.run, version=0, stop=stop, look_up=lambda: None)
        try:
            with database_away(world.database, postgres_url):
                with pytest.raises(DatabaseUnavailable), world.database.begin() as conn:
                    conn.execute(text("SELECT 1"))
                assert not waiting.done()
            for wakeup in world.feed(2):
                world.finish(wakeup)
            work = waiting.result(timeout=20)
        finally:
            stop.set()
    assert work is not None
    assert [len(group.episodes) for group in work.groups] == [2, 2]


def test_a_run_that_is_stopped_within_a_step_ends_the_trainer_and_publishes_nothing(
    world: World, new_trainer: Callable[[], Trainer]
):
    trainer = new_trainer()
    trainer.resume()
    start = newest(world)
    assert start is not None
    play(world, start)
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    with world.database.begin() as conn:
        assert run_control.stop(conn, world.run.name, why="enough").num_groups_dropped == 2

    assert trainer.train_step(work, threading.Event()) is False
    assert newest(world) == start
    assert new_trainer().train(threading.Event()) is True


def test_episodes_that_end_before_their_first_turn_count_in_the_baseline_alone(
    world: World, new_trainer: Callable[[], Trainer]
) -> None:
    trainer = new_trainer()
    version = trainer.resume()
    published = newest(world)
    assert published is not None
    play(world, published, num_groups=1)
    for number, wakeup in enumerate(world.feed(1)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            moved = episodes.move(conn, claim, EpisodeState.SAMPLED, why="no room", outcome=Outcome.CONTEXT_LIMIT)
        assert moved is not None
        world.score(moved, reward=-float(number))
    work = wait_for_work(world.database, world.run, version=version, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    assert [[len(episode.turns) for episode in group.episodes] for group in work.groups] == [[2, 2], [0, 0]]
    assert trainer.train_step(work, threading.Event())
    with world.database.begin() as conn:
        metrics = conn.execute(text("SELECT metrics FROM train_step")).scalar_one()
        assert (metrics["num_episodes"], metrics["reward_mean"]) == (4, 0.0)
        assert conn.execute(text("SELECT count(*) FROM trained_episode")).scalar_one() == 2
        summary = report.summary(conn, world.run.id)
    assert (summary.token_mismatches, summary.episodes_trained_twice) == (0, 0)


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: dict[int, float] = {}

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self.steps[version] = metrics["reward_mean"]

    def close(self) -> None:
        pass


def test_a_sink_that_hangs_stops_neither_training_nor_other_sinks(
    world: World, new_trainer: Callable[[], Trainer]
) -> None:
    kept, forever = Kept(), threading.Event()

    def hang(first: int) -> Kept:
        forever.wait(120)
        return Kept()

    tracker = Tracker([SinkThread("hanging", hang), SinkThread("kept", lambda first: kept)])
    trainer = replace(new_trainer(), tracker=tracker)
    trainer.resume()
    for number in range(2):
        play(world, wait_for_version(world, number))
        work = wait_for_work(world.database, world.run, version=number, stop=threading.Event(), look_up=lambda: None)
        assert work is not None
        assert trainer.train_step(work, threading.Event())
    tracker.close(limit_s=1.0)
    assert kept.steps == {1: 0.5, 2: 0.5}
    forever.set()


def test_another_tracking_makes_no_other_run(world: World) -> None:
    world.feed(1)
    tracked = world.run.config.model_copy(update={"tracking": TrackingConfig(sinks=("wandb",))})
    with world.database.begin() as conn:
        run = runs.open_run(conn, tracked)
    assert (run.id, run.config.tracking.sinks) == (world.run.id, ("wandb",))
