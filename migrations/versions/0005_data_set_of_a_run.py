"""Which data set a run reads, so that an edited file is noticed, and why a run cannot be fed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Apply."""
    op.add_column("run", sa.Column("dataset", sa.String(), nullable=True))
    op.add_column("run", sa.Column("error", sa.String(), nullable=True))
