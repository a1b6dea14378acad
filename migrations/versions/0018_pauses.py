"""Why a run paused itself and when it was last resumed; groups that were dropped as too few, by version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Apply."""
    op.add_column("run", sa.Column("pause_reason", sa.String(), nullable=True))
    op.add_column("run", sa.Column("resumed_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "episode_group_too_few_ix",
        "episode_group",
        ["run_id", "dropped_version"],
        postgresql_where=sa.text("drop_reason = 'too_few_samples'"),
    )
