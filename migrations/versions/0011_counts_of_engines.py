"""How often engines were loaded, refused weights and failed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Apply."""
    for name in ("num_loads", "num_refusals", "num_failures"):
        op.add_column("engine", sa.Column(name, sa.Integer(), server_default="0", nullable=False))
