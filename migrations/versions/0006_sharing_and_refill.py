"""Shares of a fleet between runs, groups that need not wait for their stragglers, and groups that are replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Apply."""
    op.add_column("run", sa.Column("sharing", JSONB(), server_default="{}", nullable=False))
    op.add_column("run", sa.Column("weight", sa.Float(), server_default="1", nullable=False))
    op.add_column("run", sa.Column("max_episodes_in_flight", sa.Integer(), nullable=True))
    op.add_column("run", sa.Column("max_sandboxes", sa.Integer(), nullable=True))
    op.add_column("episode_group", sa.Column("wanted", sa.Integer(), nullable=True))
    op.add_column("episode_group", sa.Column("dropped_version", sa.Integer(), nullable=True))
    op.create_index(
        "episode_group_refilled_ix",
        "episode_group",
        ["run_id", "dropped_version"],
        postgresql_where=sa.text("drop_reason = 'zero_variance'"),
    )
