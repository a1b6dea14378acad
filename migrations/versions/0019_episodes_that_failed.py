"""`failures_by_kind` names the episode whose failure was the last of its kind."""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"

# New columns of a view that is replaced come last; what was granted on it stays.
FAILURES_BY_KIND = """
CREATE OR REPLACE VIEW failures_by_kind AS
SELECT r.name AS run,
       CASE v.from_state WHEN 'NEW' THEN 'INIT' WHEN 'READY' THEN 'RUN' WHEN 'SAMPLED' THEN 'EVAL' END AS stage,
       split_part(v.why, ':', 1) AS kind, count(*) AS failures, count(DISTINCT v.episode_id) AS episodes,
       count(*) FILTER (WHERE v.to_state = 'FAILED') AS failed_for_good,
       (array_agg(v.why ORDER BY v.at DESC, v.id DESC))[1] AS last_error, max(v.at) AS last_at,
       (array_agg(v.episode_id ORDER BY v.at DESC, v.id DESC))[1] AS last_episode_id
  FROM episode_event v
  JOIN episode e ON e.id = v.episode_id
  JOIN run r ON r.id = e.run_id
 WHERE v.to_state IN (v.from_state, 'NEW', 'FAILED') AND v.why ~ '^[a-z_]+: '
 GROUP BY r.name, v.from_state, split_part(v.why, ':', 1)
"""


def upgrade() -> None:
    """Apply."""
    op.execute(FAILURES_BY_KIND)
