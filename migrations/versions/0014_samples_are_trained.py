"""`samples` shows rows of training episodes alone, and `turns` says which were played for an evaluation."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"

TURNS = """
CREATE OR REPLACE VIEW turns AS
SELECT r.name AS run, e.id AS episode_id, e.group_id, k.key AS task, t.sample, t.index AS turn, e.reward, e.outcome,
       token_ids(x.suffix_ids) AS suffix_ids, token_ids(x.sampled_ids) AS sampled_ids,
       logprobs(x.logprobs) AS logprobs, t.version_spans, t.messages, t.compacted, e.eval_version
  FROM episode e
  JOIN run r ON r.id = e.run_id
  JOIN episode_group g ON g.id = e.group_id
  JOIN task k ON k.id = g.task_id
  JOIN turn t ON t.episode_id = e.id AND t.attempt = e.attempt
  JOIN turn_tokens x ON x.turn_id = t.id
"""

# A trainer that reads rows here must never see held-out tasks.
SAMPLES = """
CREATE OR REPLACE VIEW samples AS
SELECT r.name AS run, e.id AS episode_id, e.group_id, k.key AS task, s.sample, e.reward, e.outcome, x.advantage,
       s.num_turns, s.num_sampled, token_ids(s.ids) AS ids, string_to_array(s.mask, NULL)::smallint[] AS mask,
       logprobs(s.logprobs) AS logprobs
  FROM episode e
  JOIN run r ON r.id = e.run_id
  JOIN episode_group g ON g.id = e.group_id
  JOIN task k ON k.id = g.task_id
  LEFT JOIN trained_episode x ON x.episode_id = e.id
 CROSS JOIN LATERAL (
       SELECT t.sample, count(*) AS num_turns, sum(t.num_sampled) AS num_sampled,
              string_agg(y.suffix_ids || y.sampled_ids, ''::bytea ORDER BY t.index) AS ids,
              string_agg(repeat('0', t.num_suffix) || repeat('1', t.num_sampled), '' ORDER BY t.index) AS mask,
              string_agg(decode(repeat('00', 4 * t.num_suffix), 'hex') || y.logprobs, ''::bytea ORDER BY t.index)
                  AS logprobs
         FROM turn t JOIN turn_tokens y ON y.turn_id = t.id
        WHERE t.episode_id = e.id AND t.attempt = e.attempt
        GROUP BY t.sample) s
 WHERE e.eval_version IS NULL
"""


def upgrade() -> None:
    """Apply."""
    op.execute(TURNS)
    op.execute(SAMPLES)
