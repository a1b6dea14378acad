"""Reads a run out of the database in bounded pieces, to be written to files by `rollmill export`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text


@dataclass(frozen=True, kw_only=True)
class Extract:
    """One table of the export."""

    name: str
    source: str
    """FROM and WHERE, with `:run_id`."""
    columns: str
    order: str


EPISODES = Extract(
    name="episodes",
    source="""
        FROM episode e
        JOIN episode_group g ON g.id = e.group_id
        JOIN task k ON k.id = g.task_id
        LEFT JOIN trained_episode x ON x.episode_id = e.id
       WHERE e.run_id = :run_id""",
    columns="""
        e.id AS episode_id, e.group_id, e.index, k.dataset, k.key AS task, k.handler, e.state, e.attempt, e.failures,
        e.outcome, e.detail, e.reward, CAST(e.reward_parts AS text) AS reward_parts, e.version_min, e.version_max,
        e.num_turns, e.num_sampled, e.eval_version, g.state AS group_state, g.drop_reason, x.step_id, x.advantage,
        CAST(e.prepared -> 'messages' AS text) AS first_messages, e.created_at, e.finished_at""",
    order="e.id",
)
TURNS = Extract(
    name="turns",
    source="""
        FROM episode e
        JOIN turn t ON t.episode_id = e.id
        JOIN turn_tokens x ON x.turn_id = t.id
       WHERE e.run_id = :run_id""",
    columns="""
        t.episode_id, t.attempt, t.index, t.sample, t.finish_reason, x.suffix_ids, x.sampled_ids, x.logprobs,
        t.version_spans AS versions, CAST(t.messages AS text) AS messages, CAST(t.compacted AS text) AS compacted,
        t.digest, t.engine, t.latency_ms, t.created_at""",
    order="t.episode_id, t.attempt, t.index",
)
EVENTS = Extract(
    name="events",
    source="FROM episode_event v JOIN episode e ON e.id = v.episode_id WHERE e.run_id = :run_id",
    columns="v.id, v.episode_id, v.at, v.attempt, v.from_state, v.to_state, v.worker, v.why",
    order="v.id",
)
STEPS = Extract(
    name="steps",
    source="FROM train_step s WHERE s.run_id = :run_id",
    columns="s.id AS step_id, s.version_in, s.state, CAST(s.metrics AS text) AS metrics, s.started_at, s.finished_at",
    order="s.version_in",
)
EXTRACTS = (EPISODES, TURNS, EVENTS, STEPS)


def hold_still(conn: Connection) -> None:
    """Let the whole transaction see the moment of its first query: a running run's tables then fit each other.

    Must be the transaction's first statement. It may take minutes, which the rule of short transactions forbids
    elsewhere: vacuum waits for it.
    """
    conn.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))


def count(conn: Connection, run_id: int, extract: Extract) -> int:
    """Rows that `stream` will give."""
    num: int = conn.execute(text(f"SELECT count(*) {extract.source}"), {"run_id": run_id}).scalar_one()
    return num


def stream(conn: Connection, run_id: int, extract: Extract, *, num_rows: int) -> Iterator[Sequence[Row[Any]]]:
    """The rows in order, at most `num_rows` at a time: no more are ever in memory, here or in the driver."""
    result = conn.execute(
        text(f"SELECT {extract.columns} {extract.source} ORDER BY {extract.order}"),
        {"run_id": run_id},
        execution_options={"yield_per": num_rows},
    )
    yield from result.partitions(num_rows)
