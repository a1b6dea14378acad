"""The claim under which an engine was last changed, and the wire that it speaks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Apply."""
    op.add_column("engine", sa.Column("claim", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("engine", sa.Column("wire", sa.String(), nullable=True))
