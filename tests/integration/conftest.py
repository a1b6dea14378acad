"""Rows to start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RolloutConfig, RunConfig, TrainConfig
from common.db import engines, runs, tasks
from common.db.session import Database
from tests.integration.world import World


@pytest.fixture
def world(database: Database) -> World:
    config = RunConfig(
        name="run-a",
        model=Path("model"),
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, minibatches=1, num_versions=4),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        payloads = [(str(i), {"number": i}) for i in range(6)]
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=payloads)
        engines.register(conn, "http://engine", run_id=run.id)
        return World(database, run, tasks.ids(conn, config.dataset_name))
