"""What a training step makes of odd groups: nobody said a word, all were as good, or some were cut off."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, report, runs, tasks
from common.db.run_lock import RunLock
from common.db.session import Database
from common.episode import EpisodeState
from common.outcomes import Outcome
from common.weights import WeightStore
from tests.integration.trained import NO_BROKER, play, wait_for_version
from tests.integration.world import World
from trainer.batches import GroupSource
from trainer.loop import Trainer, make_trainer
from trainer.source import wait_for_work
from trainer.tiny import VOCAB_SIZE, make_model, save_model


def open_world(database: Database, folder: Path, *, train: TrainConfig) -> World:
    """A run with the start weights of a tiny model."""
    torch.set_num_threads(1)
    save_model(make_model(eos_id=2, pad_id=0, seed=0), folder)
    config = RunConfig(name="run-a", model=folder, rollout=RolloutConfig(group_size=2), train=train)
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[(str(i), {}) for i in range(4)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


def play_silently(world: World) -> None:
    """Two groups of two episodes that ended before their first turn."""
    for number, wakeup in enumerate(world.feed(2)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            moved = episodes.move(
                conn, claim, EpisodeState.SAMPLED, why="no room for an answer", outcome=Outcome.CONTEXT_LIMIT
            )
        assert moved is not None
        world.score(moved, reward=float(number % 2))


def take_and_train(world: World, trainer: Trainer) -> dict[str, float]:
    """The metrics of the step of version 0, as they are stored."""
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    assert trainer.train_step(work, threading.Event())
    wait_for_version(world, 1)
    with world.database.begin() as conn:
        assert report.summary(conn, world.run.id).token_mismatches == 0
        metrics: dict[str, float] = conn.execute(text("SELECT metrics FROM train_step")).scalar_one()
    return metrics


def test_a_step_in_which_nobody_said_a_word_is_trained_with_a_warning(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = open_world(database, tmp_path / "start", train=TrainConfig(groups_per_step=2, num_versions=2))
    trainer = make_trainer(
        world.run, database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(database, world.run)
    )
    assert trainer.resume() == 0
    play_silently(world)
    source = GroupSource(
        run=world.run,
        database=database,
        weights=WeightStore(tmp_path / "other"),
        lock=trainer.lock,
        broker_url=NO_BROKER,
    )
    with caplog.at_level(logging.WARNING):
        taken = source.take(0)
    assert taken is not None
    assert (taken.rows, taken.trained, taken.metrics["lag_max"]) == ((), (), 0.0)
    assert [m for m in caplog.messages if m.startswith("not one sampled token")] != []

    caplog.clear()
    before = [parameter.detach().clone() for parameter in trainer.policy.model.parameters()]
    with caplog.at_level(logging.WARNING):
        metrics = take_and_train(world, trainer)
    assert all(map(torch.equal, before, trainer.policy.model.parameters()))
    assert (metrics["reward_mean"], metrics["num_tokens"], metrics["lag_max"], metrics["loss"]) == (0.5, 0, 0, 0)
    assert [m for m in caplog.messages if m.startswith("not one sampled token") and f"run={world.run.id} " in m] != []


def test_a_step_that_learns_nothing_is_warned_of_and_the_report_says_so(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = open_world(database, tmp_path / "start", train=TrainConfig(groups_per_step=2, num_versions=2))
    trainer = make_trainer(
        world.run, database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(database, world.run)
    )
    trainer.resume()
    play(world, wait_for_version(world, 0), rewards=(1.0, 1.0))
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    assert trainer.train_step(work, threading.Event())
    (warned,) = [message for message in caplog.messages if "nothing to learn" in message]
    assert warned == (
        f"no episode of a step has an advantage, so there is nothing to learn run={world.run.id} step={work.step.id} "
        "version=0 groups=2 zero_variance=2 episodes=4 left_out_as_truncated=0"
    )
    with world.database.begin() as conn:
        found = report.summary(conn, world.run.id)
        metrics = conn.execute(text("SELECT metrics FROM train_step")).scalar_one()
    assert metrics["entropy"] > 0
    assert not {"ratio_mean", "importance_max"} & metrics.keys()
    assert (found.groups_trained, found.groups_trained_zero_variance, found.episodes_left_out) == (2, 2, 0)


def test_tokens_of_episodes_that_are_left_out_as_truncated_are_not_in_the_divisor(
    database: Database, tmp_path: Path
) -> None:
    train = TrainConfig(groups_per_step=2, num_versions=2, minibatches=1, truncated="mask")
    world = open_world(database, tmp_path / "start", train=train)
    trainer = make_trainer(
        world.run, database, data_dir=tmp_path, broker_url=NO_BROKER, lock=RunLock(database, world.run)
    )
    trainer.resume()
    outcomes = [Outcome.FINISHED, Outcome.FINISHED, Outcome.FINISHED, Outcome.TOKEN_LIMIT]
    play(world, wait_for_version(world, 0), outcomes=outcomes)
    metrics = take_and_train(world, trainer)
    # Rewards 0 1 0 1, advantages -a a -a and none, 12 tokens each; the ratio is 1.
    a = 0.5 / (0.5 + 1e-4)
    assert metrics["left_out_episodes"] == 1
    assert metrics["loss"] == pytest.approx(-12 * (-a + a - a) / (3 * 12), abs=1e-4)


@pytest.mark.parametrize("distance", [{}, {"kl": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"}])
def test_row_that_the_model_cannot_compute_is_named_before_the_model_runs(
    database: Database, tmp_path: Path, distance: dict[str, object]
) -> None:
    train = TrainConfig.model_validate({"groups_per_step": 2, "num_versions": 2, **distance})
    world = open_world(database, tmp_path / "start", train=train)
    lock = RunLock(database, world.run)
    trainer = make_trainer(world.run, database, data_dir=tmp_path, broker_url=NO_BROKER, lock=lock)
    trainer.resume()
    play(world, wait_for_version(world, 0))
    work = wait_for_work(world.database, world.run, version=0, stop=threading.Event(), look_up=lambda: None)
    assert work is not None
    first, *others = work.groups[0].episodes
    turn = replace(first.turns[0], sampled_ids=first.turns[0].sampled_ids + VOCAB_SIZE)
    odd = replace(first, turns=(turn, *first.turns[1:]))
    groups = (replace(work.groups[0], episodes=(odd, *others)), *work.groups[1:])
    with pytest.raises(ValueError, match=rf"^episode {odd.episode_id} row 0: id \d+ is not in the model's vocabulary"):
        trainer.train_step(replace(work, groups=groups), threading.Event())
