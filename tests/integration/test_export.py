"""Runs as Parquet files, read back and compared with what the trainer would read; and runs that are pruned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from common.db import episodes, export, prune, report, retries, runs, turns
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState, FinishReason, Message, Sampled, Turn, VersionSpan
from common.errors import SetupError
from common.outcomes import Outcome
from deploy.export import export_run
from tests.integration.world import World, make_turn

LONG = Turn(
    index=1,
    sample=1,
    compacted=(Message(role="user", content="go \u6f22"),),
    suffix_ids=(151_643, 0, 2**31 - 1),
    sampled=Sampled(
        ids=(7, 8, 9, 10),
        logprobs=(-0.1, -1e-40, -17.25, 0.0),
        spans=(VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=4)),
        finish_reason=FinishReason.LENGTH,
    ),
    messages=(Message(role="assistant", content='said "ü"'), Message(role="tool", content="42")),
    engine="http://engine",
    latency_ms=3,
)


def quiet(table: str, done: int, total: int) -> None:
    """No bar."""


def play(world: World) -> list[int]:
    """Four episodes: two scored, one of them with two turns; one that failed; one that waits. Their ids."""
    wakeups = world.feed(2)
    claim = world.must_claim(world.prepare(wakeups[0]))
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
        turns.save(conn, claim, LONG)
        sampled = episodes.move(conn, claim, EpisodeState.SAMPLED, why="played", outcome=Outcome.TOKEN_LIMIT)
    assert sampled is not None
    world.score(sampled, 0.25)
    world.finish(wakeups[1])
    claim = world.must_claim(wakeups[2])
    with world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.SANDBOX_FAILED, detail="no room", afresh=True, max_attempts=1)
    return [wakeup.episode_id for wakeup in wakeups]


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{table}.parquet").to_pylist()
    return rows


def end(world: World) -> Run:
    with world.database.begin() as conn:
        runs.finish(conn, world.run.id)
        found = runs.find(conn, world.run.name)
    assert found is not None
    return found


def test_the_turns_come_back_with_the_very_ids_log_probs_and_versions(world: World, tmp_path: Path) -> None:
    first, second, *_ = play(world)
    export_run(world.database, world.run, tmp_path / "out", report=quiet)
    rows = read(tmp_path / "out", "turns")
    assert [(row["episode_id"], row["attempt"], row["index"]) for row in rows] == [
        (first, 1, 0),
        (first, 1, 1),
        (second, 1, 0),
    ]
    with world.database.begin() as conn:
        stored = [*turns.load(conn, first, 1), *turns.load(conn, second, 1)]
    for row, turn in zip(rows, stored, strict=True):
        assert tuple(row["suffix_ids"]) == turn.suffix_ids
        assert tuple(row["sampled_ids"]) == turn.sampled.ids
        assert tuple(row["logprobs"]) == turn.sampled.logprobs
        assert row["digest"] == turn.sampled.digest
        assert row["sample"] == turn.sample
        compacted = turn.compacted and [message.model_dump(mode="json") for message in turn.compacted]
        assert json.loads(row["compacted"] or "null") == compacted
        assert json.loads(row["messages"]) == [message.model_dump(mode="json") for message in turn.messages]
    assert [row["versions"] for row in rows] == [[0, 0, 0], [0, 1, 1, 1], [0, 0, 0]]
    assert rows[1]["finish_reason"] == "length"
    assert (stored[1].sample, stored[1].compacted) == (LONG.sample, LONG.compacted)


def test_episodes_events_and_steps_come_back(world: World, tmp_path: Path) -> None:
    scored, _, failed, waiting = play(world)
    num_rows = export_run(world.database, world.run, tmp_path / "out", report=quiet)
    by_id = {row["episode_id"]: row for row in read(tmp_path / "out", "episodes")}
    assert (by_id[scored]["reward"], by_id[scored]["outcome"], by_id[scored]["version_max"]) == (0.25, "token_limit", 1)
    assert (by_id[failed]["state"], by_id[failed]["detail"], by_id[failed]["reward"]) == ("FAILED", "no room", None)
    assert (by_id[waiting]["state"], by_id[waiting]["finished_at"]) == ("NEW", None)
    assert by_id[scored]["created_at"].utcoffset().total_seconds() == 0
    states = [row["to_state"] for row in read(tmp_path / "out", "events") if row["episode_id"] == scored]
    assert states == ["NEW", "READY", "SAMPLED", "SCORED"]
    assert read(tmp_path / "out", "steps") == []
    assert num_rows == {"episodes": 4, "turns": 3, "events": 11, "steps": 0}
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (about["run"], about["state"], about["config"]["name"]) == ("run-a", "ACTIVE", "run-a")


def test_a_running_runs_tables_are_of_one_moment(world: World, tmp_path: Path) -> None:
    world.finish(world.feed()[0])

    def interfere(table: str, done: int, total: int) -> None:
        if (table, done) == ("turns", 0):
            play(world)

    assert export_run(world.database, world.run, tmp_path / "out", report=interfere) == {
        "episodes": 2,
        "turns": 1,
        "events": 5,
        "steps": 0,
    }


def test_only_the_named_run_is_exported(world: World, tmp_path: Path) -> None:
    play(world)
    with world.database.begin() as conn:
        other = runs.open_run(conn, world.run.config.model_copy(update={"name": "other"}))
    assert set(export_run(world.database, other, tmp_path / "out", report=quiet).values()) == {0}
    assert pq.read_schema(tmp_path / "out" / "turns.parquet").field("logprobs").type.value_type == "float"


def test_rows_are_read_in_bounded_pieces(world: World) -> None:
    for wakeup in world.feed(3):
        world.finish(wakeup)
    with world.database.begin() as conn:
        export.hold_still(conn)
        sizes = [len(rows) for rows in export.stream(conn, world.run.id, export.TURNS, num_rows=4)]
    assert sizes == [4, 2]


def test_an_export_that_is_stopped_leaves_nothing(world: World, tmp_path: Path) -> None:
    play(world)

    def stop(table: str, done: int, total: int) -> None:
        if (table, done) == ("turns", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(world.database, world.run, tmp_path / "out", report=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SetupError, match=f"{tmp_path} exists"):
        export_run(world.database, world.run, tmp_path, report=quiet)


def test_a_folder_is_made_only_in_one_that_is_there(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for place in (tmp_path / "mine", tmp_path / "a" / "b"):
        with pytest.raises(SetupError, match=f"there is no folder {place} to write into: make it"):
            export_run(world.database, world.run, place / "out", report=quiet)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def count(database: Database, table: str) -> int:
    with database.begin() as conn:
        num: int = conn.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
    return num


def test_a_run_that_goes_on_is_not_pruned(world: World) -> None:
    play(world)
    with pytest.raises(SetupError, match="run run-a is ACTIVE: only a run that is FINISHED or STOPPED is pruned"):
        prune.check_prunable(world.database, world.run, whole=False)


def test_a_run_that_somebody_still_works_on_is_not_pruned(world: World) -> None:
    *_, waiting = world.feed(2)
    world.must_claim(waiting)
    with pytest.raises(SetupError, match="run run-a: 1 episodes are still worked on"):
        prune.check_prunable(world.database, end(world), whole=False)


def test_a_run_with_a_sandbox_is_not_deleted(world: World) -> None:
    first, *_ = play(world)
    with world.database.begin() as conn:
        conn.execute(
            text("INSERT INTO sandbox (episode_id, attempt, backend, node, handle) VALUES (:id, 1, 'b', 'n', 'h')"),
            {"id": first},
        )
    run = end(world)
    prune.check_prunable(world.database, run, whole=False)
    with pytest.raises(SetupError, match="1 sandboxes still stand"):
        prune.check_prunable(world.database, run, whole=True)


def test_pruned_turns_keep_every_figure_of_the_report(world: World) -> None:
    play(world)
    run = end(world)
    with world.database.begin() as conn:
        before = report.summary(conn, run.id)
    assert sum(prune.empty_turns(world.database, run)) == 4
    with world.database.begin() as conn:
        assert report.summary(conn, run.id) == before
        assert conn.execute(text("SELECT messages FROM turn")).scalars().all() == [[], [], []]
    assert (count(world.database, "turn"), count(world.database, "turn_tokens")) == (3, 0)


def test_a_deleted_run_leaves_its_tasks_and_other_runs(world: World) -> None:
    play(world)
    with world.database.begin() as conn:
        runs.open_run(conn, world.run.config.model_copy(update={"name": "other"}))
    assert sum(prune.delete_run(world.database, end(world))) == 4
    for table in ("episode", "turn", "turn_tokens", "episode_event", "episode_group"):
        assert count(world.database, table) == 0
    assert (count(world.database, "run"), count(world.database, "task")) == (1, 6)


def test_pruning_again_changes_nothing(world: World) -> None:
    play(world)
    run = end(world)
    for _ in range(2):
        assert sum(prune.empty_turns(world.database, run)) == 4
