"""Functions that turn stored bytes into arrays, and the views that people query."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

TOKEN_IDS = """
CREATE FUNCTION token_ids(packed bytea) RETURNS integer[] LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT coalesce(array_agg(get_byte(packed, i) | (get_byte(packed, i + 1) << 8)
                              | (get_byte(packed, i + 2) << 16) | (get_byte(packed, i + 3) << 24) ORDER BY i), '{}')
      FROM generate_series(0, length(packed) - 4, 4) AS i
$$
"""

LOGPROBS = """
CREATE FUNCTION logprobs(packed bytea) RETURNS real[] LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT coalesce(array_agg((CASE
               WHEN exponent = 255 AND fraction = 0 THEN sign * 'Infinity'::float8
               WHEN exponent = 255 THEN 'NaN'::float8
               WHEN exponent = 0 THEN sign * fraction * power(2::float8, -149)
               ELSE sign * (8388608 + fraction) * power(2::float8, exponent - 150) END)::real ORDER BY i), '{}')
      FROM (SELECT i, CASE WHEN bits < 0 THEN -1 ELSE 1 END AS sign, (bits >> 23) & 255 AS exponent,
                   bits & 8388607 AS fraction
              FROM unnest(token_ids(packed)) WITH ORDINALITY AS float_bits (bits, i)) AS parts
$$
"""

SAMPLES = """
CREATE VIEW samples AS
SELECT r.name AS run, e.id AS episode_id, e.group_id, k.key AS task, t.index AS turn, e.reward, e.outcome,
       token_ids(x.suffix_ids) AS suffix_ids, token_ids(x.sampled_ids) AS sampled_ids,
       logprobs(x.logprobs) AS logprobs, t.version_spans, t.messages
  FROM episode e
  JOIN run r ON r.id = e.run_id
  JOIN episode_group g ON g.id = e.group_id
  JOIN task k ON k.id = g.task_id
  JOIN turn t ON t.episode_id = e.id AND t.attempt = e.attempt
  JOIN turn_tokens x ON x.turn_id = t.id
"""

REWARD_BY_VERSION = """
CREATE VIEW reward_by_version AS
SELECT r.name AS run, e.version_min AS version, count(*) AS episodes, avg(e.reward) AS mean_reward,
       stddev_pop(e.reward) AS std_reward, avg(e.num_turns) AS mean_turns, avg(e.num_sampled) AS mean_tokens
  FROM episode e JOIN run r ON r.id = e.run_id
 WHERE e.state = 'SCORED'
 GROUP BY r.name, e.version_min
"""

STALENESS = """
CREATE VIEW staleness AS
SELECT r.name AS run, s.version_in AS trained_version, s.version_in - e.version_min AS lag, count(*) AS episodes
  FROM trained_episode x
  JOIN train_step s ON s.id = x.step_id
  JOIN episode e ON e.id = x.episode_id
  JOIN run r ON r.id = s.run_id
 GROUP BY r.name, s.version_in, s.version_in - e.version_min
"""

EPISODE_TIMINGS = """
CREATE VIEW episode_timings AS
SELECT r.name AS run, e.id AS episode_id, e.outcome, e.failures,
       extract(epoch FROM ready.at - e.created_at) AS init_s, extract(epoch FROM sampled.at - ready.at) AS run_s,
       extract(epoch FROM e.finished_at - sampled.at) AS eval_s,
       extract(epoch FROM e.finished_at - e.created_at) AS total_s
  FROM episode e
  JOIN run r ON r.id = e.run_id
  LEFT JOIN LATERAL (SELECT max(at) AS at FROM episode_event
                      WHERE episode_id = e.id AND from_state = 'NEW' AND to_state = 'READY') ready ON true
  LEFT JOIN LATERAL (SELECT max(at) AS at FROM episode_event
                      WHERE episode_id = e.id AND from_state = 'READY' AND to_state = 'SAMPLED') sampled ON true
"""

FAILURES_BY_KIND = """
CREATE VIEW failures_by_kind AS
SELECT r.name AS run, e.outcome, e.state, count(*) AS episodes, max(e.detail) AS last_error
  FROM episode e JOIN run r ON r.id = e.run_id
 WHERE e.state = 'FAILED' OR e.failures > 0
 GROUP BY r.name, e.outcome, e.state
"""


def upgrade() -> None:
    """Apply."""
    for statement in (
        TOKEN_IDS,
        LOGPROBS,
        SAMPLES,
        REWARD_BY_VERSION,
        STALENESS,
        EPISODE_TIMINGS,
        FAILURES_BY_KIND,
    ):
        op.execute(statement)
