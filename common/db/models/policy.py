"""The policy: its versions, the engines that serve it, the steps that train it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Index,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from common.db.models.base import Base, row_id


class Engine(Base):
    """An inference server that serves one run's policy."""

    __tablename__ = "engine"
    id: Mapped[int] = row_id()
    url: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))
    state: Mapped[str] = mapped_column(server_default="SERVING")
    version: Mapped[int | None]
    """Policy version of `run_id` that it serves; None = none yet."""
    loading: Mapped[int | None]
    """Policy version that its keeper fetches and loads; None = none."""
    owner: Mapped[str | None]
    """The weight keeper that may load weights into it."""
    owner_until: Mapped[datetime | None]
    claim: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Of the last one who set out to change it; only grows. An engine refuses what comes under an older one."""
    wire: Mapped[str | None]
    """Name of the language in which it last answered its keeper; None = it never did."""
    healthy_at: Mapped[datetime | None]
    """When it last answered."""
    failures: Mapped[int] = mapped_column(server_default="0")
    """Failed loads or probes in a row."""
    num_loads: Mapped[int] = mapped_column(server_default="0")
    """Versions loaded into it since it was registered first. This and the next two only grow."""
    num_refusals: Mapped[int] = mapped_column(server_default="0")
    """Loads that were refused, by the keeper or the engine: the version is damaged or does not fit."""
    num_failures: Mapped[int] = mapped_column(server_default="0")
    """Loads and probes that failed otherwise: it was away, too slow, or broken."""
    retry_at: Mapped[datetime | None]
    error: Mapped[str | None]


class PolicyVersion(Base):
    """A published version of a run's weights; 0 = the start weights."""

    __tablename__ = "policy_version"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    path: Mapped[str]
    manifest_sha256: Mapped[str]
    published_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))


class EvaluationPoint(Base):
    """A version that is evaluated on held-out tasks, from the moment it is published until its last episode."""

    __tablename__ = "evaluation_point"
    __table_args__ = (
        Index("evaluation_point_open_ix", "run_id", "version", postgresql_where=text("finished_at IS NULL")),
    )
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    error: Mapped[str | None]
    """Why it was given up; None = it was not."""
    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    finished_at: Mapped[datetime | None]
    """None = engines that have reached the version stay there."""


class TrainStep(Base):
    """One training step: OPEN with its groups, then DONE with its version, in one transaction each.

    DROPPED if the run is stopped in between.
    """

    __tablename__ = "train_step"
    __table_args__ = (
        UniqueConstraint("run_id", "version_in"),
        Index("train_step_open_ix", "run_id", unique=True, postgresql_where=text("state = 'OPEN'")),
    )
    id: Mapped[int] = row_id()
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    version_in: Mapped[int]
    """The version that is trained; the step makes version_in + 1."""
    state: Mapped[str] = mapped_column(server_default="OPEN")
    num_groups: Mapped[int] = mapped_column(server_default="0")
    """Groups that it trained; 0 until it is DONE. The sum over a run's steps is the number of its TRAINED groups."""
    metrics: Mapped[dict[str, Any] | None]
    error: Mapped[str | None]
    """Why it failed the last time, also once it is DONE; None = it never did."""
    failures: Mapped[int] = mapped_column(server_default="0")
    """Times that it failed since the run was last started by hand, for a reason that trying again need not mend."""
    replays: Mapped[int] = mapped_column(server_default="0")
    """Times that a trainer found it OPEN since the run was last started by hand."""
    started_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    finished_at: Mapped[datetime | None]


class TrainedEpisode(Base):
    """An episode that went into a loss. The primary key makes training one twice impossible."""

    __tablename__ = "trained_episode"
    episode_id: Mapped[int] = mapped_column(ForeignKey("episode.id"), primary_key=True, autoincrement=False)
    step_id: Mapped[int] = mapped_column(ForeignKey("train_step.id"), index=True)
    digest: Mapped[bytes]
    """sha256 over the turns' digests, recomputed from the very arrays that entered the loss."""
    advantage: Mapped[float]
    num_tokens: Mapped[int]
