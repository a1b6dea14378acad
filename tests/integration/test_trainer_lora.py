"""A trainer of an adapter on a real database: what it publishes, and where it goes on after a stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, runs, tasks, turns, versions
from common.db.session import Database
from common.db.versions import PolicyVersion
from common.episode import EpisodeState
from common.outcomes import Outcome
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightStore, verify
from tests.integration import test_trainer
from tests.integration.trained import sampled_turns
from tests.integration.world import World
from trainer.loop import Trainer
from trainer.source import wait_for_work
from trainer.tiny import make_model, save_model


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    save_model(make_model(eos_id=2, pad_id=0, seed=0), tmp_path / "start")
    config = RunConfig(
        name="run-a",
        model=tmp_path / "start",
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, num_versions=3, lora_rank=4),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[(str(i), {}) for i in range(4)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


new_trainer = test_trainer.new_trainer


def newest(world: World) -> PolicyVersion:
    with world.database.begin() as conn:
        version = versions.newest(conn, world.run.id)
    assert version is not None
    return version


def train_one(world: World, trainer: Trainer, *, version: int) -> None:
    """One step over groups that the trainer's own policy sampled, as an engine with its adapter would."""
    for number, wakeup in enumerate(world.feed(2)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            for turn in sampled_turns(trainer.policy, seed=wakeup.episode_id, version=version):
                turns.save(conn, claim, turn)
            moved = episodes.move(conn, claim, EpisodeState.SAMPLED, why="finished", outcome=Outcome.FINISHED)
        assert moved is not None
        world.score(moved, reward=float(number % 2))
    stop = threading.Event()
    work = wait_for_work(world.database, world.run, version=version, stop=stop, look_up=trainer.ensure_published)
    assert work is not None
    assert trainer.train_step(work, stop)


def test_every_version_is_an_adapter_and_a_restart_goes_on_with_it(
    world: World, new_trainer: Callable[[], Trainer]
) -> None:
    first = new_trainer()
    assert first.resume() == 0
    train_one(world, first, version=0)
    assert isinstance(first.weights, WeightStore)
    for number in (0, 1):
        path = first.weights.path("run-a", number)
        assert {file.name for file in path.iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "manifest.json"}
    version = newest(world)
    verify(version.path, version.manifest_sha256)
    assert (version.number, version.adapters_kept) == (1, 3)

    second = new_trainer()
    assert second.resume() == 1
    before, after = first.policy.state(), second.policy.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train_one(world, second, version=1)
    assert newest(world).number == 2
