"""Why a training step fails, and how often; rewards of any size are averaged without overflow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

REWARD_BY_VERSION = """
CREATE OR REPLACE VIEW reward_by_version AS
SELECT r.name AS run, e.version_min AS version, count(*) AS episodes,
       avg(greatest(least(e.reward, 1e6), -1e6)) AS mean_reward,
       stddev_pop(greatest(least(e.reward, 1e6), -1e6)) AS std_reward,
       avg(e.num_turns) AS mean_turns, avg(e.num_sampled) AS mean_tokens
  FROM episode e JOIN run r ON r.id = e.run_id
 WHERE e.state = 'SCORED'
 GROUP BY r.name, e.version_min
"""


def upgrade() -> None:
    """Apply. Rewards beyond 1e6 are of the time before they were refused: the view shows them as 1e6."""
    op.add_column("train_step", sa.Column("error", sa.String(), nullable=True))
    op.add_column("train_step", sa.Column("failures", sa.Integer(), server_default="0", nullable=False))
    op.execute(REWARD_BY_VERSION)
