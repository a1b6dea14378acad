"""Which version an engine is about to serve: its files are not pruned meanwhile."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Apply."""
    op.add_column("engine", sa.Column("loading", sa.Integer(), nullable=True))
