"""A teacher behind HTTP in the trainer's loop: its numbers reach the step, and without it nothing is trained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_distill import DistillConfig
from common.config_train import TrainConfig
from common.db import engines, report, runs, steps, tasks
from common.db.run_lock import RunLock
from common.db.session import Database
from common.errors import SetupError
from tests.integration.trained import NO_BROKER, newest, play, wait_for_version
from tests.integration.world import World
from tests.served import served
from trainer.loop import make_trainer
from trainer.source import wait_for_work
from trainer.teacher import read_tokenizer
from trainer.teacher_server import COMPLETIONS
from workers.scripted_engine import Fault, ScriptedEngine

START = TINY_MODELS / "tiny-calculator"


@pytest.fixture
def teacher() -> Iterator[ScriptedEngine]:
    """Finds every id as likely as e^-2."""
    engine = ScriptedEngine(lambda prompt: [1], logprob=-2.0)
    tokenizer = read_tokenizer(START)
    engine.decode = lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
    with served(engine):
        yield engine


@pytest.fixture
def world(database: Database, teacher: ScriptedEngine) -> World:
    torch.set_num_threads(1)
    config = RunConfig(
        name="run-a",
        model=START,
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(
            groups_per_step=2, num_versions=3, distill=DistillConfig(teacher=teacher.url, max_requests=1)
        ),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[(str(i), {}) for i in range(4)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


def test_step_waits_for_a_teacher_that_is_away_and_trains_with_its_numbers(
    world: World, teacher: ScriptedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(
        world.run, world.database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(world.database, world.run)
    )
    trainer.resume()
    start = wait_for_version(world, 0)
    play(world, start)
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None

    teacher.fail_next(COMPLETIONS, *[Fault.ERROR] * 9)
    with pytest.raises(SetupError, match=r"^the teacher is away for 0 s: .* answers 500: .* replays a step that"):
        replace(trainer, outage_wait_s=0.0).train_step(work, threading.Event())
    assert newest(world) == start
    teacher.faults.clear()
    teacher.fail_next(COMPLETIONS, Fault.CUT, Fault.ERROR)
    assert trainer.train_step(work, threading.Event())

    turns = [turn for group in work.groups for episode in group.episodes for turn in episode.turns]
    behaviour = [logprob for turn in turns for logprob in turn.logprobs.tolist()]
    with world.database.begin() as conn:
        metrics = conn.execute(text("SELECT metrics FROM train_step")).scalar_one()
        assert steps.open_step(conn, world.run.id) is None
        assert report.summary(conn, world.run.id).episodes_trained == 4
    assert metrics["teacher_kl"] == pytest.approx(sum(behaviour) / len(behaviour) + 2.0, abs=1e-4)
    # One request fails and one is cut; the answers that came before are not asked for again.
    assert teacher.num_tokens <= 2 * 4


def test_teacher_of_another_vocabulary_is_refused_before_anything_is_published(
    world: World, teacher: ScriptedEngine, tmp_path: Path
) -> None:
    teacher.decode = lambda token_id: f"<{token_id}>"
    trainer = make_trainer(
        world.run, world.database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(world.database, world.run)
    )
    with pytest.raises(SetupError, match="has another tokenizer than the run's model: id 0 is '<0>' there"):
        trainer.train(threading.Event())
    assert newest(world) is None
