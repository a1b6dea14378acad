"""Retries that wait: an episode is neither claimed nor announced before its time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

DELAYED = "not_before IS NOT NULL AND claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED')"


def upgrade() -> None:
    """Apply."""
    op.add_column("episode", sa.Column("not_before", sa.DateTime(timezone=True), nullable=True))
    op.create_index("episode_delayed_ix", "episode", ["not_before"], postgresql_where=sa.text(DELAYED))
