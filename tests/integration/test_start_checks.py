"""What `rollmill up --dry-run` asks of a database that is up, and of the handler: it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import TINY_MODELS, RunConfig
from common.db import groups, run_control, runs, tasks
from common.db.session import Database
from common.errors import SetupError
from common.settings import Settings
from deploy.start_checks import start_checks


def run_config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "mine", "model": TINY_MODELS / "tiny-calculator"} | sections)


def first_line(config: RunConfig, settings: Settings) -> str:
    return next(start_checks(config, config_file=Path("run.toml"), settings=settings, trainer="own"))


def test_a_run_of_that_name_is_looked_at_and_left_as_it_is(database: Database, database_url: str) -> None:
    settings, config = Settings(database_url=database_url), run_config()
    changed = run_config(train={"num_versions": 50, "learning_rate": 0.0005}, eval={"every_versions": 5})
    assert first_line(config, settings) == "checked: the database has no run mine yet"
    with database.begin() as conn:
        run = runs.open_run(conn, config)
    # A run without groups takes another configuration.
    assert first_line(changed, settings) == "checked: run mine is there already and would go on"
    with database.begin() as conn:
        tasks.load(conn, dataset="d", handler="calculator", payloads=[("0", {})])
        groups.create(conn, run_id=run.id, task_ids=tasks.ids(conn, "d"), size=8)
    assert first_line(config, settings) == "checked: run mine is there already and would go on"
    with pytest.raises(SetupError) as refused:
        first_line(changed, settings)
    assert str(refused.value).startswith(
        "run mine exists with another configuration: train.num_versions 40 -> 50, train.learning_rate 0.001 -> 0.0005, "
        "eval not set -> {every_versions = 5, "
    )
    with database.begin() as conn:
        assert runs.require(conn, "mine").config == config
        run_control.pause(conn, "mine")
    with pytest.raises(SetupError, match="run mine is paused: let it go on with"):
        first_line(config, settings)
    with database.begin() as conn:
        runs.note_pause(conn, run.id, reason="80 groups were dropped")
    with pytest.raises(SetupError, match=r"run mine is paused \(80 groups were dropped\): let it go on with"):
        first_line(config, settings)


def test_what_cannot_be_asked_is_said(database: Database, database_url: str, tmp_path: Path) -> None:
    assert first_line(run_config(), Settings(data_dir=tmp_path)) == (
        "not checked: whether there is a run mine already, as no database is up"
    )
    with database.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    assert first_line(run_config(), Settings(database_url=database_url)).startswith(
        "not checked: whether there is a run mine already: "
    )


def test_tasks_whose_first_prompts_fill_the_row_are_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    full = run_config(rollout={"max_row_tokens": 20, "max_tokens_per_turn": 10})
    with pytest.raises(SetupError, match=r"first 4 tasks have \d+ to \d+ ids, and rollout.max_row_tokens is 20: noth"):
        list(start_checks(full, config_file=Path("run.toml"), settings=settings, trainer="own"))
    _, prompts, trainer = start_checks(run_config(), config_file=Path("run.toml"), settings=settings, trainer="own")
    assert prompts.startswith("checked: the first prompts of 4 tasks have up to ")
    assert trainer == "not checked: what own needs"
