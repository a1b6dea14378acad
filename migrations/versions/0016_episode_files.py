"""Files that RUN hands over to EVAL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "episode_files",
        sa.Column("episode_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("num_files", sa.Integer(), nullable=False),
        sa.Column("left_out", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["episode_id"], ["episode.id"], name=op.f("episode_files_episode_id_fkey")),
        sa.PrimaryKeyConstraint("episode_id", "attempt", name=op.f("episode_files_pkey")),
    )
    # It is compressed already.
    op.execute("ALTER TABLE episode_files ALTER COLUMN content SET STORAGE EXTERNAL")
