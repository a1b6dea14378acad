"""How often engines were loaded, refused weights and failed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "kills"
down_revision = "0009"


def upgrade() -> None:
    """Apply."""
    for name in ("num_loads", "num_refusals", "num_failures"):
        op.add_column("engine", sa.Column(name, sa.Integer(), server_default="0", nullable=False))
