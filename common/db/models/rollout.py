"""Runs, their tasks, and all that becomes of an episode in INIT, RUN and EVAL."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    Index,
    SmallInteger,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from common.db.models.base import Base, at_now, row_id


class Run(Base):
    """One training run with one policy."""

    __tablename__ = "run"
    id: Mapped[int] = row_id()
    name: Mapped[str] = mapped_column(unique=True)
    config: Mapped[dict[str, Any]]
    """RunConfig as resolved, without its section [sharing], which is no part of what the run is."""
    sharing: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    """The section [sharing] as it was last configured; the three columns are what holds now."""
    weight: Mapped[float] = mapped_column(server_default="1")
    max_episodes_in_flight: Mapped[int | None]
    """None = no limit of its own."""
    max_sandboxes: Mapped[int | None]
    state: Mapped[str] = mapped_column(server_default="ACTIVE")
    epoch: Mapped[int] = mapped_column(server_default="0")
    """Data cursor: passes over the task set that are finished."""
    cursor: Mapped[int] = mapped_column(server_default="0")
    """Data cursor: tasks of this epoch that have a group."""
    dataset: Mapped[str | None]
    """Name of its task set, with a hash of the tasks; None = the feeder has not read it yet."""
    error: Mapped[str | None]
    """Why the feeder cannot feed it; None = it can."""
    pause_reason: Mapped[str | None]
    """Why the trainer paused it last; None = it did not, somebody has resumed it since, or paused it by hand."""
    resumed_at: Mapped[datetime | None]
    """When somebody last resumed it; None = nobody did."""
    created_at: Mapped[datetime] = at_now()
    finished_at: Mapped[datetime | None]


class Task(Base):
    """One problem. Its key is unique within its data set."""

    __tablename__ = "task"
    __table_args__ = (UniqueConstraint("dataset", "key"),)
    id: Mapped[int] = row_id()
    dataset: Mapped[str]
    key: Mapped[str]
    handler: Mapped[str]
    payload: Mapped[dict[str, Any]]


class Submission(Base):
    """A task that was handed to a run while it went on; the feeder plays it before the run's own task set."""

    __tablename__ = "submission"
    __table_args__ = (Index("submission_waiting_ix", "run_id", "task_id", postgresql_where=text("fed_at IS NULL")),)
    task_id: Mapped[int] = mapped_column(ForeignKey("task.id"), primary_key=True, autoincrement=False)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    submitted_at: Mapped[datetime] = at_now()
    fed_at: Mapped[datetime | None]
    """When its group was made; None = it waits for room."""


class EpisodeGroup(Base):
    """G episodes of one task in one run."""

    __tablename__ = "episode_group"
    __table_args__ = (
        Index(
            "episode_group_evaluation_ix", "run_id", "eval_version", postgresql_where=text("eval_version IS NOT NULL")
        ),
        Index("episode_group_complete_ix", "run_id", "id", postgresql_where=text("state = 'COMPLETE'")),
        Index("episode_group_in_flight_ix", "run_id", postgresql_where=text("state IN ('OPEN', 'COMPLETE', 'TAKEN')")),
        Index(
            "episode_group_refilled_ix",
            "run_id",
            "dropped_version",
            postgresql_where=text("drop_reason = 'zero_variance'"),
        ),
        Index(
            "episode_group_too_few_ix",
            "run_id",
            "dropped_version",
            postgresql_where=text("drop_reason = 'too_few_samples'"),
        ),
        Index(None, "step_id"),
    )
    id: Mapped[int] = row_id()
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    task_id: Mapped[int] = mapped_column(ForeignKey("task.id"))
    size: Mapped[int]
    wanted: Mapped[int | None]
    """Scored episodes that complete it: the rest is then cancelled. None = all are waited for."""
    num_final: Mapped[int] = mapped_column(server_default="0")
    """Episodes of the group in a final state."""
    state: Mapped[str] = mapped_column(server_default="OPEN")
    eval_version: Mapped[int | None]
    """Policy version that it evaluates; None = it is for training."""
    step_id: Mapped[int | None] = mapped_column(ForeignKey("train_step.id"))
    drop_reason: Mapped[str | None]
    dropped_version: Mapped[int | None]
    """Policy version that was to be trained when the trainer dropped it; None = the trainer did not."""
    created_at: Mapped[datetime] = at_now()
    completed_at: Mapped[datetime | None]


class Episode(Base):
    """One attempt of the agent at a task."""

    __tablename__ = "episode"
    __table_args__ = (
        UniqueConstraint("group_id", "index"),
        Index(
            "episode_waiting_ix",
            "enqueued_at",
            postgresql_where=text("claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED')"),
        ),
        Index(
            "episode_delayed_ix",
            "not_before",
            postgresql_where=text(
                "not_before IS NOT NULL AND claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED')"
            ),
        ),
        Index("episode_claimed_ix", "lease_until", postgresql_where=text("claim_token IS NOT NULL")),
        Index(None, "run_id", "state"),
        CheckConstraint("(state = 'SCORED') = (reward IS NOT NULL)", name="reward_iff_scored"),
        {"postgresql_with": {"fillfactor": "80"}},
    )
    id: Mapped[int] = row_id()
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    group_id: Mapped[int] = mapped_column(ForeignKey("episode_group.id"))
    index: Mapped[int]
    """0 … G-1 within the group."""
    eval_version: Mapped[int | None]
    """That of its group: it plays on engines that serve this version, and is never trained. None = for training."""
    state: Mapped[str] = mapped_column(server_default="NEW")
    attempt: Mapped[int] = mapped_column(SmallInteger, server_default="1")
    """1 = the first try. A retry that cannot go on from what is stored is a new attempt, with turns of its own."""
    failures: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    """Times that infrastructure failed under it, in any stage; bounded by the setting max_attempts."""
    claim_worker: Mapped[str | None]
    claim_token: Mapped[UUID | None]
    """The fence: every write of a stage names it."""
    lease_until: Mapped[datetime | None]
    enqueued_at: Mapped[datetime] = at_now()
    """When it was last announced on its queue."""
    not_before: Mapped[datetime | None]
    """A retry that waits: nobody claims it and no message is sent before. None = at once."""
    prepared: Mapped[dict[str, Any] | None]
    """INIT's result: first messages, tools, sandbox."""
    node: Mapped[str | None]
    """Where this attempt's sandbox lies, if RUN can use it there alone; None = RUN may be anywhere."""
    outcome: Mapped[str | None]
    detail: Mapped[str | None]
    """The last error, for people."""
    reward: Mapped[float | None]
    reward_parts: Mapped[dict[str, Any] | None]
    version_min: Mapped[int | None]
    """Oldest policy version among its sampled tokens."""
    version_max: Mapped[int | None]
    num_turns: Mapped[int] = mapped_column(server_default="0")
    num_sampled: Mapped[int] = mapped_column(server_default="0")
    """Sampled tokens over all turns."""
    created_at: Mapped[datetime] = at_now()
    finished_at: Mapped[datetime | None]


class EpisodeEvent(Base):
    """One row per move of an episode: the history that people query."""

    __tablename__ = "episode_event"
    __table_args__ = (Index(None, "episode_id"),)
    id: Mapped[int] = row_id()
    episode_id: Mapped[int] = mapped_column(ForeignKey("episode.id"))
    at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    attempt: Mapped[int] = mapped_column(SmallInteger)
    from_state: Mapped[str | None]
    to_state: Mapped[str]
    worker: Mapped[str | None]
    why: Mapped[str | None]


class Turn(Base):
    """One model call of an attempt."""

    __tablename__ = "turn"
    __table_args__ = (UniqueConstraint("episode_id", "attempt", "index"),)
    id: Mapped[int] = row_id()
    episode_id: Mapped[int] = mapped_column(ForeignKey("episode.id"))
    attempt: Mapped[int] = mapped_column(SmallInteger)
    index: Mapped[int] = mapped_column(SmallInteger)
    sample: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    """Training row of the attempt that it belongs to: one more with each turn whose history was rewritten."""
    finish_reason: Mapped[str]
    num_suffix: Mapped[int]
    num_sampled: Mapped[int]
    version_spans: Mapped[list[Any]]
    """[{version, start, end}] over the sampled ids."""
    digest: Mapped[bytes]
    """sha256 of the sampled ids and log-probs as they came over the wire."""
    messages: Mapped[list[Any]]
    compacted: Mapped[list[Any] | None] = mapped_column(JSONB(none_as_null=True))
    """What the handler left of the conversation before this turn; NULL = all of it."""
    engine: Mapped[str]
    latency_ms: Mapped[int]
    created_at: Mapped[datetime] = at_now()


class TurnTokens(Base):
    """The token arrays of a turn, apart from the rows that queries scan."""

    __tablename__ = "turn_tokens"
    turn_id: Mapped[int] = mapped_column(ForeignKey("turn.id", ondelete="CASCADE"), primary_key=True)
    suffix_ids: Mapped[bytes]
    """int32 little-endian; what was appended to the prompt before this turn, or all of it where a sample begins."""
    sampled_ids: Mapped[bytes]
    """int32 little-endian."""
    logprobs: Mapped[bytes]
    """float32 little-endian, nats."""


class Sandbox(Base):
    """A sandbox that INIT made and somebody must remove."""

    __tablename__ = "sandbox"
    __table_args__ = (
        UniqueConstraint("episode_id", "attempt"),
        Index("sandbox_live_ix", "episode_id", postgresql_where=text("destroyed_at IS NULL")),
    )
    id: Mapped[int] = row_id()
    episode_id: Mapped[int] = mapped_column(ForeignKey("episode.id"))
    attempt: Mapped[int] = mapped_column(SmallInteger)
    backend: Mapped[str]
    node: Mapped[str]
    handle: Mapped[str]
    created_at: Mapped[datetime] = at_now()
    destroyed_at: Mapped[datetime | None]


class EpisodeFiles(Base):
    """What an attempt's agent handed in: RUN takes it out of the sandbox, EVAL tests it."""

    __tablename__ = "episode_files"
    episode_id: Mapped[int] = mapped_column(ForeignKey("episode.id"), primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    num_files: Mapped[int]
    left_out: Mapped[dict[str, Any]]
    """Reason -> number of files that were wanted and did not come along."""
    content: Mapped[bytes]
    """zlib; `Submission.unpack` reads it."""
    created_at: Mapped[datetime] = at_now()


class Node(Base):
    """A node on which a RUN fleet lives, or has lived."""

    __tablename__ = "node"
    name: Mapped[str] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime]
    """When a RUN process of it last said that it lives."""
