"""Evaluation of versions on held-out tasks: which versions, groups of theirs, and the view `evaluation`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

REWARD_BY_VERSION = """
CREATE VIEW reward_by_version AS
SELECT r.name AS run, e.version_min AS version, count(*) AS episodes,
       avg(greatest(least(e.reward, 1e6), -1e6)) AS mean_reward,
       stddev_pop(greatest(least(e.reward, 1e6), -1e6)) AS std_reward,
       avg(e.num_turns) AS mean_turns, avg(e.num_sampled) AS mean_tokens
  FROM episode e JOIN run r ON r.id = e.run_id
 WHERE e.state = 'SCORED' AND e.eval_version IS NULL
 GROUP BY r.name, e.version_min
"""

# An episode that was scored with tokens of another version says nothing of this one: it is counted apart. One that was
# scored without a single turn does. Tasks weigh alike, and are what varies: episodes of one task are no independent
# draws (Miller 2024, Adding Error Bars to Evals, section 2.2). Pass@k is the unbiased estimator (Chen et al. 2021,
# Evaluating Large Language Models Trained on Code, section 2.1) over the tasks with at least k scored episodes.
EVALUATION = """
CREATE VIEW evaluation AS
WITH played AS (
    SELECT g.run_id, g.eval_version AS version, g.id, count(*) AS episodes,
           count(*) FILTER (WHERE e.counts) AS n,
           count(*) FILTER (WHERE e.counts AND e.reward >= CAST(r.config #>> '{eval,success_reward}' AS float8)) AS c,
           avg(e.reward) FILTER (WHERE e.counts) AS mean,
           count(*) FILTER (WHERE e.state = 'SCORED' AND NOT e.counts) AS mixed,
           count(*) FILTER (WHERE e.state = 'FAILED') AS failed,
           count(*) FILTER (WHERE e.state = 'CANCELLED') AS cancelled
      FROM episode_group g
      JOIN run r ON r.id = g.run_id
      JOIN LATERAL (SELECT state, reward, state = 'SCORED' AND coalesce(version_min, g.eval_version) = g.eval_version
                           AND coalesce(version_max, g.eval_version) = g.eval_version AS counts
                      FROM episode WHERE group_id = g.id) e ON true
     WHERE g.eval_version IS NOT NULL
     GROUP BY g.run_id, g.eval_version, g.id
), totals AS (
    SELECT run_id, version, count(*) AS tasks, sum(episodes)::bigint AS episodes, sum(n)::bigint AS scored,
           avg(mean) AS mean_reward, stddev_samp(mean) / sqrt(count(mean)) AS standard_error,
           sum(failed)::bigint AS failed, sum(mixed)::bigint AS mixed, sum(cancelled)::bigint AS cancelled
      FROM played GROUP BY run_id, version
), pass AS (
    SELECT p.run_id, p.version, k.k,
           avg(CASE WHEN p.n - p.c < k.k THEN 1 ELSE
               1 - factorial(p.n - p.c) * factorial(p.n - k.k) / (factorial(p.n - p.c - k.k) * factorial(p.n)) END)
               AS rate
      FROM played p
      JOIN run r ON r.id = p.run_id
     CROSS JOIN LATERAL generate_series(1, CAST(r.config #>> '{eval,samples_per_task}' AS int)) AS k (k)
     WHERE p.n >= k.k
     GROUP BY p.run_id, p.version, k.k
)
SELECT r.name AS run, v.version, v.finished_at IS NOT NULL AS finished, coalesce(t.tasks, 0) AS tasks,
       coalesce(t.episodes, 0) AS episodes, coalesce(t.scored, 0) AS scored, t.mean_reward, t.standard_error,
       (SELECT array_agg(CAST(rate AS float8) ORDER BY k) FROM pass
         WHERE run_id = v.run_id AND version = v.version) AS pass_at,
       coalesce(t.failed, 0) AS failed, coalesce(t.mixed, 0) AS mixed, coalesce(t.cancelled, 0) AS cancelled,
       v.error, v.created_at, v.finished_at
  FROM evaluation_point v
  JOIN run r ON r.id = v.run_id
  LEFT JOIN totals t ON t.run_id = v.run_id AND t.version = v.version
"""


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "evaluation_point",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("evaluation_point_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("evaluation_point_pkey")),
    )
    op.create_index(
        "evaluation_point_open_ix",
        "evaluation_point",
        ["run_id", "version"],
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    for table in ("episode_group", "episode"):
        op.add_column(table, sa.Column("eval_version", sa.Integer(), nullable=True))
    op.create_index(
        "episode_group_evaluation_ix",
        "episode_group",
        ["run_id", "eval_version"],
        postgresql_where=sa.text("eval_version IS NOT NULL"),
    )
    op.execute("DROP VIEW reward_by_version")
    op.execute(REWARD_BY_VERSION)
    op.execute(EVALUATION)
