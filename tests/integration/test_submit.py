"""`rollmill submit`: tasks for a run that goes on, and what happens to them when the run is stopped at that moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import JsonValue
from sqlalchemy import text

from common.db import run_control, submissions
from common.db.session import Database
from common.db.submissions import Submitted
from common.episode import RunState
from common.errors import SetupError
from tests.integration.conftest import Answer
from tests.integration.test_sharing import open_run
from workers.feeder import Feeder

SUBMITTED: list[tuple[str, dict[str, JsonValue]]] = [("a", {"number": 1}), ("b", {"number": 2}), ("c", {"number": 3})]


def submit(database: Database, name: str, given: Sequence[tuple[str, dict[str, JsonValue]]] = SUBMITTED) -> Submitted:
    with database.begin() as conn:
        return submissions.submit(conn, name, given)


def feeder(database: Database) -> Feeder:
    return Feeder(database, lambda wakeups: None)


def played(database: Database) -> list[str]:
    """Keys of the submitted tasks that have a group, in the order of the groups."""
    with database.begin() as conn:
        query = "SELECT key FROM episode_group g JOIN task t ON t.id = g.task_id WHERE dataset LIKE 'submitted:%'"
        return list(conn.execute(text(f"{query} ORDER BY g.id")).scalars())


def test_submitted_tasks_are_played_first_and_once(database: Database):
    run = open_run(database, "one", max_episodes_in_flight=4)
    assert submit(database, "one") == Submitted(num_new=3, num_known=0, num_waiting=3, run_state=RunState.ACTIVE)
    again = submit(database, "one", [*SUBMITTED[1:], ("d", {})])
    assert (again.num_new, again.num_known, again.num_waiting) == (1, 2, 4)
    assert feeder(database).round() == 2
    assert played(database) == ["a", "b"]
    with database.begin() as conn:
        assert conn.execute(text("SELECT cursor FROM run WHERE id = :id"), {"id": run.id}).scalar_one() == 0
        conn.execute(text("UPDATE episode SET state = 'CANCELLED'"))
        conn.execute(text("UPDATE episode_group SET state = 'DROPPED'"))
    assert feeder(database).round() == 2
    assert played(database) == ["a", "b", "c", "d"]
    with database.begin() as conn:
        conn.execute(text("UPDATE episode SET state = 'CANCELLED'"))
        conn.execute(text("UPDATE episode_group SET state = 'DROPPED'"))
    assert feeder(database).round() == 2
    assert played(database) == ["a", "b", "c", "d"], "the data set goes on where it stood"
    with database.begin() as conn:
        assert conn.execute(text("SELECT cursor FROM run WHERE id = :id"), {"id": run.id}).scalar_one() == 2


def test_a_key_that_stands_for_another_task_is_refused_whole(database: Database):
    open_run(database, "one")
    submit(database, "one")
    with pytest.raises(SetupError, match="task 'b' was submitted before with other contents"):
        submit(database, "one", [("new", {}), ("b", {"number": 7})])
    with database.begin() as conn:
        assert conn.execute(text("SELECT count(*) FROM task WHERE dataset LIKE 'submitted:%'")).scalar_one() == 3


def test_a_run_that_is_over_takes_no_tasks(database: Database):
    open_run(database, "one")
    with database.begin() as conn:
        run_control.stop(conn, "one", why="enough")
    with pytest.raises(SetupError, match="run one is stopped: it takes no tasks"):
        submit(database, "one")
    with pytest.raises(SetupError, match="no run two in the database"):
        submit(database, "two")


def test_a_submission_at_the_moment_of_a_stop_is_refused_or_ended_with_the_run(database: Database):
    """Twenty times both at once: whichever comes first, no submitted task is played after the stop."""
    for number in range(20):
        name = f"run-{number}"
        open_run(database, name)
        ready = threading.Barrier(2)
        refused: list[str] = []

        def hand_in(name: str = name, ready: threading.Barrier = ready, refused: list[str] = refused) -> None:
            ready.wait(10)
            try:
                submit(database, name)
            except SetupError as error:
                refused.append(str(error))

        thread = threading.Thread(target=hand_in)
        thread.start()
        ready.wait(10)
        with database.begin() as conn:
            run_control.stop(conn, name, why="enough")
        thread.join(10)
        assert not thread.is_alive()
        assert refused in ([], [f"run {name} is stopped: it takes no tasks. Start a run of another name"])
    assert feeder(database).round() == 0
    assert played(database) == []


def test_the_command_says_what_waits_and_refuses_what_is_no_task(
    database: Database, rollmill: Callable[..., Answer], tmp_path: Path
):
    open_run(database, "one")
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "x", "n": 1}\n{"n": 2}\n')
    answer: Answer = rollmill("submit", "one", str(file))
    assert answer == (0, "run one: 2 tasks submitted; 2 tasks waiting for room\n")
    assert rollmill("submit", "one", str(file))[1].startswith("run one: 0 tasks submitted, 2 known from before;")
    for line in (
        '{"x": NaN}',
        '{"x": 1e999}',
        r'{"x": "\u0000"}',
        r'{"x": "\ud800"}',
        '{"id": {}}',
        '{"x": ' + "[" * 9999,
    ):
        file.write_text(f"{{}}\n{line}\n")
        code, said = rollmill("submit", "one", str(file))
        assert (code, said.count("\n")) == (2, 1), said
        assert said.startswith(f"rollmill: data set {file} line 2: ")
    file.write_text("{}\nnope\n")
    code, said = rollmill("submit", "one", str(file))
    assert code == 2
    assert "line 2 is not JSON" in said
    code, said = rollmill("submit", "gone", str(tmp_path / "gone.jsonl"))
    assert code == 2
    assert "cannot be read" in said
