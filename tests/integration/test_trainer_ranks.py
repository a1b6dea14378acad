"""The trainer as torchrun's two processes on a real database: it trains, stops when told, and one process goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs, tasks, versions
from common.db.run_lock import RunLock
from common.db.session import Database
from common.db.versions import PolicyVersion
from tests.integration.world import World
from trainer.loop import make_trainer
from trainer.tiny import make_model, save_model

TIMEOUT_S = 200.0


@pytest.fixture
def world(database: Database, tmp_path: Path) -> World:
    save_model(make_model(eos_id=2, pad_id=0, seed=0), tmp_path / "start")
    config = RunConfig(
        name="run-a",
        model=tmp_path / "start",
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, num_versions=3),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=[(str(i), {}) for i in range(4)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


def wait_for_version(world: World, number: int, launcher: subprocess.Popen[bytes]) -> PolicyVersion:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with world.database.begin() as conn:
            newest = versions.newest(conn, world.run.id)
        if newest is not None and newest.number >= number:
            return newest
        assert time.monotonic() < deadline, f"version {number} did not come"
        assert launcher.poll() is None, f"torchrun ended with {launcher.returncode}"
        time.sleep(0.05)


def launch(tmp_path: Path, database_url: str) -> subprocess.Popen[bytes]:
    (tmp_path / "run.toml").write_text(
        f'name = "run-a"\nmodel = "{tmp_path / "start"}"\n[rollout]\ngroup_size = 2\n'
        "[train]\ngroups_per_step = 2\nnum_versions = 3\n"
    )
    environment = {
        "ROLLMILL_DATABASE_URL": database_url,
        "ROLLMILL_BROKER_URL": "amqp://guest:guest@127.0.0.1:1//",
        "ROLLMILL_DATA_DIR": str(tmp_path / "data"),
        "OMP_NUM_THREADS": "1",
    }
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [sys.executable, "-m", *launcher, "-m", "trainer", "--config", str(tmp_path / "run.toml")]
    return subprocess.Popen(command, env=os.environ | environment)


def give_groups(world: World, *, version: int) -> None:
    for number, wakeup in enumerate(world.feed(2)):
        world.finish(wakeup, version=version, reward=float(number % 2))


def test_two_ranks_train_and_stop_and_one_goes_on(world: World, database_url: str, tmp_path: Path) -> None:
    give_groups(world, version=0)
    with launch(tmp_path, database_url) as launcher:
        try:
            first = wait_for_version(world, 1, launcher)
            # All ranks get it; the first one's exit code is that of a trainer that was told to stop.
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(timeout=TIMEOUT_S)
        finally:
            launcher.kill()
    checkpoint = tmp_path / "data" / "checkpoints" / "run-a" / "000001"
    assert [len(list(checkpoint.glob(f"__{rank}_*"))) for rank in range(2)] == [1, 1]
    trainer = make_trainer(
        world.run,
        world.database,
        data_dir=tmp_path / "data",
        broker_url="amqp://guest:guest@127.0.0.1:1//",
        lock=RunLock(world.database, world.run),
    )
    assert trainer.resume() == 1
    published = AutoModelForCausalLM.from_pretrained(first.path).state_dict()
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32).state_dict()
    for name, tensor in trainer.policy.model.state_dict().items():
        assert torch.equal(published[name], tensor)
    assert not torch.equal(published["lm_head.weight"], start["lm_head.weight"])
