"""Tasks that are handed to a run while it goes on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "submission",
        sa.Column("task_id", sa.BigInteger(), sa.ForeignKey("task.id", name="submission_task_id_fkey"), nullable=False),
        sa.Column("run_id", sa.BigInteger(), sa.ForeignKey("run.id", name="submission_run_id_fkey"), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.Column("fed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("task_id", name="submission_pkey"),
    )
    op.create_index(
        "submission_waiting_ix", "submission", ["run_id", "task_id"], postgresql_where=sa.text("fed_at IS NULL")
    )
