"""Which run a repeated command goes on with."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import text

from common.config import RolloutConfig, RunConfig, SharingConfig
from common.db import run_control, runs
from common.db.resume import name_to_go_on
from common.db.session import Database


def config(group_size: int = 4, weight: float = 1.0) -> RunConfig:
    return RunConfig(
        name="demo",
        model=Path("model"),
        rollout=RolloutConfig(group_size=group_size),
        sharing=SharingConfig(weight=weight),
    )


def test_an_unfinished_run_of_the_same_configuration_goes_on(database: Database):
    with database.begin() as conn:
        assert name_to_go_on(conn, config()) == "demo"
        runs.open_run(conn, config())
        assert name_to_go_on(conn, config()) == "demo"
        assert name_to_go_on(conn, config(weight=2.0)) == "demo", "its share is no part of what it is"
        assert name_to_go_on(conn, config(group_size=8)) == "demo-2"
        run_control.stop(conn, "demo", why="enough")
        assert name_to_go_on(conn, config()) == "demo-2"


def test_a_run_that_an_earlier_version_began_goes_on(database: Database):
    """It was stored without the fields that have been added since, or with one that is gone."""
    with database.begin() as conn:
        runs.open_run(conn, config())
        conn.execute(text("UPDATE run SET config = config - 'render' #- '{rollout,init_timeout_s}'"))
        assert name_to_go_on(conn, config()) == "demo"
        conn.execute(text("UPDATE run SET config = jsonb_set(config, '{gone}', '1')"))
        assert name_to_go_on(conn, config()) == "demo-2"


def test_a_run_with_a_setting_that_is_refused_by_now_does_not_stop_the_others(database: Database):
    with database.begin() as conn:
        runs.open_run(conn, config())
        stored = '{"importance_cap": 0.5, "dual_clip": 1e9, "loss": "cispo"}'
        conn.execute(
            text("UPDATE run SET config = jsonb_set(config, '{train}', config -> 'train' || CAST(:stored AS jsonb))"),
            {"stored": stored},
        )
        (run,) = runs.active(conn)
        assert (run.name, run.config.train.importance_cap) == ("demo", 0.5)
        assert name_to_go_on(conn, config()) == "demo-2"
