"""How often a training step was begun anew, for a trainer that is killed in it again and again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Apply."""
    op.add_column("train_step", sa.Column("replays", sa.Integer(), server_default="0", nullable=False))
