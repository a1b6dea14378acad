"""The feeder killed around its commit: over epochs, tasks come in their order, none twice and none left out."""

from __future__ import annotations

import signal
from pathlib import Path

from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, runs, tasks
from common.db.runs import DataCursor, Run
from common.db.session import Database
from tests.integration.doomed import Point, run_until
from workers.feeder import next_tasks

MOVED = r"UPDATE run SET epoch"
LIVES = (
    f"commit after {MOVED}",
    f"after commit of {MOVED}",
    f"sql {MOVED}",
    f"after commit of {MOVED}",
    f"after commit of {MOVED}",
)
"""Where each process dies, one after the other."""
NUM_TASKS, GROUPS_PER_STEP, GROUP_SIZE = 5, 2, 2


def make_run(database: Database) -> Run:
    config = RunConfig(
        name="run-a",
        model=TINY_MODELS / "tiny-calculator",
        num_tasks=NUM_TASKS,
        rollout=RolloutConfig(group_size=GROUP_SIZE),
        train=TrainConfig(groups_per_step=GROUPS_PER_STEP, max_staleness=0),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0"))
    return run


def make_room(database: Database) -> None:
    """Drop the groups there are, so that the next feeder makes others."""
    with database.begin() as conn:
        conn.execute(text("UPDATE episode_group SET state = 'DROPPED', drop_reason = 'stale' WHERE state = 'OPEN'"))


def test_killed_feeder_neither_repeats_nor_skips_a_task(database: Database, database_url: str, tmp_path: Path) -> None:
    run = make_run(database)
    for pattern in LIVES:
        make_room(database)
        exit_code = run_until(
            ["workers.feeder"],
            environment={"ROLLMILL_DATABASE_URL": database_url, "ROLLMILL_BROKER_URL": "memory://"},
            log=tmp_path / "feeder.log",
            point=Point(pattern=pattern),
            timeout_s=60,
        )
        assert exit_code == -signal.SIGKILL, (tmp_path / "feeder.log").read_text()
    with database.begin() as conn:
        played = list(conn.execute(text("SELECT task_id FROM episode_group ORDER BY id")).scalars())
        dataset = conn.execute(text("SELECT dataset FROM run")).scalar_one()
        task_ids, cursor = tasks.ids(conn, dataset), runs.lock_cursor(conn, run.id)
        unsent = episodes.resend(conn, after_s=0)
        fed = list(conn.execute(text("SELECT id FROM episode ORDER BY id")).scalars())
    assert len(task_ids) == NUM_TASKS
    assert len(played) == 3 * GROUPS_PER_STEP > NUM_TASKS, "the lives that came to their commit, and into an epoch more"
    assert (played, cursor) == next_tasks(task_ids, DataCursor(epoch=0, index=0), num=len(played), seed=run.config.seed)
    assert sorted(wakeup.episode_id for wakeup in unsent) == fed, "nobody heard of any; each is sent once more"
