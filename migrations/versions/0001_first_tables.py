"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "run",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.String(), server_default="ACTIVE", nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cursor", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("run_pkey")),
        sa.UniqueConstraint("name", name=op.f("run_name_key")),
    )
    op.create_table(
        "task",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("dataset", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("handler", sa.String(), nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("task_pkey")),
        sa.UniqueConstraint("dataset", "key", name=op.f("task_dataset_key_key")),
    )
    op.create_table(
        "engine",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=True),
        sa.Column("state", sa.String(), server_default="SERVING", nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("owner_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("healthy_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("engine_run_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("engine_pkey")),
        sa.UniqueConstraint("url", name=op.f("engine_url_key")),
    )
    op.create_table(
        "policy_version",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("manifest_sha256", sa.String(), nullable=False),
        sa.Column(
            "published_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("policy_version_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("policy_version_pkey")),
    )
    op.create_table(
        "train_step",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("version_in", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), server_default="OPEN", nullable=False),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("train_step_run_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("train_step_pkey")),
        sa.UniqueConstraint("run_id", "version_in", name=op.f("train_step_run_id_version_in_key")),
    )
    op.create_index(
        "train_step_open_ix", "train_step", ["run_id"], unique=True, postgresql_where=sa.text("state = 'OPEN'")
    )
    op.create_table(
        "episode_group",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("num_final", sa.Integer(), server_default="0", nullable=False),
        sa.Column("state", sa.String(), server_default="OPEN", nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=True),
        sa.Column("drop_reason", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("completed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("episode_group_run_id_fkey")),
        sa.ForeignKeyConstraint(["step_id"], ["train_step.id"], name=op.f("episode_group_step_id_fkey")),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("episode_group_task_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("episode_group_pkey")),
    )
    op.create_index(
        "episode_group_complete_ix",
        "episode_group",
        ["run_id", "id"],
        unique=False,
        postgresql_where=sa.text("state = 'COMPLETE'"),
    )
    op.create_index(
        "episode_group_in_flight_ix",
        "episode_group",
        ["run_id"],
        unique=False,
        postgresql_where=sa.text("state IN ('OPEN', 'COMPLETE', 'TAKEN')"),
    )
    op.create_index(op.f("episode_group_step_id_ix"), "episode_group", ["step_id"], unique=False)
    op.create_table(
        "episode",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), server_default="NEW", nullable=False),
        sa.Column("attempt", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("failures", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("claim_worker", sa.String(), nullable=True),
        sa.Column("claim_token", sa.Uuid(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("enqueued_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("prepared", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reward_parts", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("version_min", sa.Integer(), nullable=True),
        sa.Column("version_max", sa.Integer(), nullable=True),
        sa.Column("num_turns", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_sampled", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'SCORED') = (reward IS NOT NULL)", name=op.f("episode_reward_iff_scored_check")),
        sa.ForeignKeyConstraint(["group_id"], ["episode_group.id"], name=op.f("episode_group_id_fkey")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("episode_run_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("episode_pkey")),
        sa.UniqueConstraint("group_id", "index", name=op.f("episode_group_id_index_key")),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index(
        "episode_claimed_ix",
        "episode",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("claim_token IS NOT NULL"),
    )
    op.create_index(op.f("episode_run_id_state_ix"), "episode", ["run_id", "state"], unique=False)
    op.create_index(
        "episode_waiting_ix",
        "episode",
        ["enqueued_at"],
        unique=False,
        postgresql_where=sa.text("claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED')"),
    )
    op.create_table(
        "episode_event",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("episode_id", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("from_state", sa.String(), nullable=True),
        sa.Column("to_state", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=True),
        sa.Column("why", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["episode_id"], ["episode.id"], name=op.f("episode_event_episode_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("episode_event_pkey")),
    )
    op.create_index(op.f("episode_event_episode_id_ix"), "episode_event", ["episode_id"], unique=False)
    op.create_table(
        "sandbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("episode_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("handle", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("destroyed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["episode_id"], ["episode.id"], name=op.f("sandbox_episode_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("sandbox_pkey")),
        sa.UniqueConstraint("episode_id", "attempt", name=op.f("sandbox_episode_id_attempt_key")),
    )
    op.create_index(
        "sandbox_live_ix", "sandbox", ["episode_id"], unique=False, postgresql_where=sa.text("destroyed_at IS NULL")
    )
    op.create_table(
        "trained_episode",
        sa.Column("episode_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episode.id"], name=op.f("trained_episode_episode_id_fkey")),
        sa.ForeignKeyConstraint(["step_id"], ["train_step.id"], name=op.f("trained_episode_step_id_fkey")),
        sa.PrimaryKeyConstraint("episode_id", name=op.f("trained_episode_pkey")),
    )
    op.create_index(op.f("trained_episode_step_id_ix"), "trained_episode", ["step_id"], unique=False)
    op.create_table(
        "turn",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("episode_id", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("index", sa.SmallInteger(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=False),
        sa.Column("num_suffix", sa.Integer(), nullable=False),
        sa.Column("num_sampled", sa.Integer(), nullable=False),
        sa.Column("version_spans", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("messages", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("latency_ms", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episode.id"], name=op.f("turn_episode_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("turn_pkey")),
        sa.UniqueConstraint("episode_id", "attempt", "index", name=op.f("turn_episode_id_attempt_index_key")),
    )
    op.create_table(
        "turn_tokens",
        sa.Column("turn_id", sa.BigInteger(), nullable=False),
        sa.Column("suffix_ids", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turn.id"], name=op.f("turn_tokens_turn_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("turn_id", name=op.f("turn_tokens_pkey")),
    )
    for column in ("suffix_ids", "sampled_ids", "logprobs"):
        # Compressing 500-byte arrays of ids costs more time than the space is worth.
        op.execute(f"ALTER TABLE turn_tokens ALTER COLUMN {column} SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE episode SET (autovacuum_vacuum_scale_factor = 0.02)")
