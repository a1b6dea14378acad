from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs
from common.db.episodes import Wakeup
from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError
from tests.integration.world import unheard
from workers.feeder import Feeder
from workers.render.of_run import renderer_of


def make_run(database: Database, name: str, *, handler: str = "calculator", dataset: Path | None = None) -> Run:
    config = RunConfig(
        name=name,
        handler=handler,
        model=Path("model"),
        dataset=dataset,
        num_tasks=2000 if dataset else 4,
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, minibatches=1),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, f"http://{name}", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0 WHERE run_id = :id"), {"id": run.id})
    return run


@pytest.fixture
def sent() -> list[Wakeup]:
    return []


@pytest.fixture
def feeder(database: Database, sent: list[Wakeup]) -> Feeder:
    return Feeder(database, sent.extend)


def tasks_of(database: Database, run: Run) -> set[tuple[str, str]]:
    """(handler, question) of the tasks that the run's groups play."""
    with database.begin() as conn:
        rows = conn.execute(
            text(
                "SELECT t.handler, t.payload ->> 'q' AS q FROM episode_group g JOIN task t ON t.id = g.task_id"
                " WHERE g.run_id = :id"
            ),
            {"id": run.id},
        )
        return {(row.handler, row.q) for row in rows}


def error_of(database: Database, run: Run) -> str | None:
    with database.begin() as conn:
        return runs.error_of(conn, run.id)


def test_runs_that_read_one_file_with_other_handlers_get_tasks_of_their_own(
    database: Database, feeder: Feeder, tmp_path: Path
):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": "a"}\n')
    first = make_run(database, "first", handler="calculator", dataset=file)
    second = make_run(database, "second", handler="shell", dataset=file)
    feeder.round()
    assert tasks_of(database, first) == {("calculator", "a")}
    assert tasks_of(database, second) == {("shell", "a")}


def test_a_new_run_reads_the_file_as_it_is_now_and_an_old_one_refuses_it(database: Database, tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": "a"}\n')
    old = make_run(database, "old", dataset=file)
    Feeder(database, unheard).round()
    file.write_text('{"q": "b"}\n')
    new = make_run(database, "new", dataset=file)

    Feeder(database, unheard).round()

    assert tasks_of(database, old) == {("calculator", "a")}
    assert tasks_of(database, new) == {("calculator", "b")}
    assert "is not what run old began with" in (error_of(database, old) or "")
    assert error_of(database, new) is None


@pytest.mark.parametrize(
    ("handler", "lines", "expected"),
    [
        ("no.such:Thing", "{}", "no module 'no'"),
        ("nothing", "{}", "unknown handler 'nothing'"),
        ("calculator", "", "has no tasks"),
        ("calculator", "{", "line 1 is not JSON"),
    ],
)
def test_a_run_that_cannot_be_fed_says_why_and_keeps_no_other_waiting(
    database: Database, feeder: Feeder, tmp_path: Path, handler: str, lines: str, expected: str
):
    file = tmp_path / "tasks.jsonl"
    file.write_text(lines)
    broken = make_run(database, "broken", handler=handler, dataset=file)
    healthy = make_run(database, "healthy")
    feeder.round()
    assert expected in (error_of(database, broken) or "")
    assert tasks_of(database, healthy)


def test_a_run_whose_template_cannot_be_extended_is_not_fed(database: Database, sent: list[Wakeup]):
    run = make_run(database, "run")

    Feeder(database, sent.extend, prove=renderer_of).round()

    assert "model has no tokenizer.json" in (error_of(database, run) or "")
    assert sent == []


def test_a_run_without_groups_takes_a_corrected_configuration(database: Database):
    make_run(database, "run", handler="nothing")
    Feeder(database, unheard).round()
    run = make_run(database, "run", handler="calculator")
    assert error_of(database, run) is None
    Feeder(database, unheard).round()
    assert tasks_of(database, run)
    with pytest.raises(SetupError, match=r"exists with another configuration: handler calculator -> shell\. Take"):
        make_run(database, "run", handler="shell")
