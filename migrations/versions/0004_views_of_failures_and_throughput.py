"""Failures by their own kind, from the history, and how many episodes each stage finishes a minute."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

FAILURES_BY_KIND = """
CREATE VIEW failures_by_kind AS
SELECT r.name AS run,
       CASE v.from_state WHEN 'NEW' THEN 'INIT' WHEN 'READY' THEN 'RUN' WHEN 'SAMPLED' THEN 'EVAL' END AS stage,
       split_part(v.why, ':', 1) AS kind, count(*) AS failures, count(DISTINCT v.episode_id) AS episodes,
       count(*) FILTER (WHERE v.to_state = 'FAILED') AS failed_for_good,
       (array_agg(v.why ORDER BY v.at DESC))[1] AS last_error, max(v.at) AS last_at
  FROM episode_event v
  JOIN episode e ON e.id = v.episode_id
  JOIN run r ON r.id = e.run_id
 WHERE v.to_state IN (v.from_state, 'NEW', 'FAILED') AND v.why ~ '^[a-z_]+: '
 GROUP BY r.name, v.from_state, split_part(v.why, ':', 1)
"""

STAGE_THROUGHPUT = """
CREATE VIEW stage_throughput AS
SELECT r.name AS run, date_trunc('minute', v.at) AS minute,
       CASE v.from_state WHEN 'NEW' THEN 'INIT' WHEN 'READY' THEN 'RUN' ELSE 'EVAL' END AS stage,
       count(*) AS episodes
  FROM episode_event v
  JOIN episode e ON e.id = v.episode_id
  JOIN run r ON r.id = e.run_id
 WHERE (v.from_state, v.to_state) IN (('NEW', 'READY'), ('READY', 'SAMPLED'), ('SAMPLED', 'SCORED'))
 GROUP BY r.name, date_trunc('minute', v.at), v.from_state
"""


def upgrade() -> None:
    """Apply. The old view counted retried episodes by the agent's outcome, which says nothing about the failure."""
    op.execute("DROP VIEW failures_by_kind")
    op.execute(FAILURES_BY_KIND)
    op.execute(STAGE_THROUGHPUT)
