"""Which node an episode is bound to by its sandbox, and on which nodes RUN lives."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Apply."""
    op.add_column("episode", sa.Column("node", sa.String(), nullable=True))
    op.create_table(
        "node",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("node_pkey")),
    )
