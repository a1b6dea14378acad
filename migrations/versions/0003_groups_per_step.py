"""How many groups each step trained, so that the feeder need not count a run's groups again each round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

COUNT = """
UPDATE train_step s SET num_groups = counted.num
  FROM (SELECT step_id, count(*) AS num FROM episode_group WHERE state = 'TRAINED' GROUP BY step_id) AS counted
 WHERE counted.step_id = s.id
"""


def upgrade() -> None:
    """Apply."""
    op.add_column("train_step", sa.Column("num_groups", sa.Integer(), server_default="0", nullable=False))
    op.execute(COUNT)
