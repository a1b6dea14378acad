"""The example of a trainer of one's own, on real groups: it learns, and goes on where it died."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs, tasks
from common.db.run_lock import RunLock
from common.db.session import Database
from common.weights import WeightStore
from examples.own_trainer import train
from tests.integration.world import World
from trainer.batches import GroupSource

NO_BROKER = "amqp://guest:guest@127.0.0.1:1//"


class Died(Exception):
    """The process, for this test."""


class Dying(GroupSource):
    """Dies when it would publish, after the state was saved."""

    def finish(self, *args: object, **kwargs: object) -> bool:
        raise Died


@pytest.fixture
def world(database: Database) -> World:
    torch.set_num_threads(1)
    config = RunConfig(
        name="run-a",
        model=TINY_MODELS / "tiny-calculator",
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=1, minibatches=1, num_versions=2),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[("0", {}), ("1", {})])
        world = World(database, run, tasks.ids(conn, config.dataset_name))
    for number, wakeup in enumerate(world.feed(2)):
        world.finish(wakeup, reward=float(number % 2))
    return world


@contextmanager
def open_source(world: World, folder: Path, kind: type[GroupSource]) -> Iterator[GroupSource]:
    weights = WeightStore(folder / "weights")
    with RunLock(world.database, world.run) as lock:
        yield kind(run=world.run, database=world.database, weights=weights, lock=lock, broker_url=NO_BROKER)


def run_trainer(world: World, folder: Path, kind: type[GroupSource]) -> int:
    with open_source(world, folder, kind) as source:
        return train(source, folder / "states")


def test_example_trains_each_group_once_though_it_dies_before_it_publishes(world: World, tmp_path: Path) -> None:
    with pytest.raises(Died):
        run_trainer(world, tmp_path, Dying)
    assert run_trainer(world, tmp_path, GroupSource) == 2
    check_trained_once(world, tmp_path)


@pytest.mark.filterwarnings("default")
def test_example_with_trl_trains_each_group_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from examples import own_trainer_trl

    with open_source(world, tmp_path, GroupSource) as source:
        assert own_trainer_trl.train(source, tmp_path / "states") == 2
    check_trained_once(world, tmp_path)


def check_trained_once(world: World, folder: Path) -> None:
    with world.database.begin() as conn:
        assert conn.execute(text("SELECT state FROM run")).scalar_one() == "FINISHED"
        steps = conn.execute(text("SELECT version_in, state, num_groups FROM train_step ORDER BY 1")).all()
        assert [tuple(step) for step in steps] == [(0, "DONE", 1), (1, "DONE", 1)]
        assert conn.execute(text("SELECT count(*) FROM trained_episode")).scalar_one() == 4
    weights = [load_file(folder / "weights" / "run-a" / f"{n:06}" / "model.safetensors") for n in range(3)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[1][name], weights[2][name])
