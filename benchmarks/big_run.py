"""A run with a long past: nearly all its episodes are final, as after weeks of work."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import text

from common.db.session import Database

GROUP_SIZE = 8
GROUPS_PER_STEP = 8
NUM_COMPLETE = 36
"""Groups that wait for the trainer."""
NUM_OPEN = 100
"""Groups without a final episode."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long the past is."""

    num_steps: int
    """Finished training steps, each of GROUPS_PER_STEP groups."""
    turns_per_episode: int = 1

    @property
    def num_final(self) -> int:
        """Groups that were trained or dropped."""
        return self.num_steps * GROUPS_PER_STEP

    @property
    def num_groups(self) -> int:
        return self.num_final + NUM_COMPLETE + NUM_OPEN

    @property
    def num_episodes(self) -> int:
        return self.num_groups * GROUP_SIZE

    @property
    def num_turns(self) -> int:
        """Those in flight have none."""
        return (self.num_final + NUM_COMPLETE) * GROUP_SIZE * self.turns_per_episode


_FILL = (
    """
    INSERT INTO train_step (id, run_id, version_in, state) SELECT n, :run, n - 1, 'DONE'
      FROM generate_series(1, :num_steps) AS n
    """,
    """
    INSERT INTO episode_group (id, run_id, task_id, size, num_final, state, step_id, drop_reason, completed_at)
    SELECT n, :run, 1 + n % 6, :size, CASE WHEN n <= :num_final + :num_complete THEN :size ELSE 0 END,
           CASE WHEN n > :num_final + :num_complete THEN 'OPEN' WHEN n > :num_final THEN 'COMPLETE'
                WHEN n % 20 = 0 THEN 'DROPPED' ELSE 'TRAINED' END,
           CASE WHEN n <= :num_final AND n % 20 <> 0 THEN 1 + (n - 1) / :per_step END,
           CASE WHEN n <= :num_final AND n % 20 = 0 THEN 'stale' END,
           CASE WHEN n <= :num_final + :num_complete THEN now() END
      FROM generate_series(1, :num_groups) AS n
    """,
    """
    UPDATE train_step s SET num_groups = counted.num
      FROM (SELECT step_id, count(*) AS num FROM episode_group GROUP BY step_id) AS counted WHERE counted.step_id = s.id
    """,
    """
    INSERT INTO episode (id, run_id, group_id, index, state, outcome, reward, version_min, version_max, num_turns,
                         num_sampled, prepared, finished_at, enqueued_at)
    SELECT (g.id - 1) * :size + i + 1, :run, g.id, i, 'SCORED', 'finished', 0.5, version, version, :turns, 3 * :turns,
           '{"sandbox": null}', now(), now()
      FROM (SELECT id, least(id / :per_step, :num_steps) AS version FROM episode_group WHERE state <> 'OPEN') AS g,
           generate_series(0, :size - 1) AS i
    """,
    # Of the episodes in flight a half is claimed, and of those a quarter has outlived its lease. Of
    # those that wait, a quarter was delayed and is due.
    """
    INSERT INTO episode (id, run_id, group_id, index, state, outcome, prepared, enqueued_at, claim_worker, claim_token,
                         lease_until, not_before)
    SELECT (g.id - 1) * :size + i + 1, :run, g.id, i, (ARRAY['NEW', 'READY', 'SAMPLED'])[1 + (g.id + i) % 3],
           CASE WHEN (g.id + i) % 3 = 2 THEN 'finished' END, '{"sandbox": null}', now() - i * interval '1 minute',
           CASE WHEN i >= 4 THEN 'w' END, CASE WHEN i >= 4 THEN gen_random_uuid() END,
           CASE WHEN i >= 4 THEN now() + (6.5 - i) * interval '1 hour' END,
           CASE WHEN i = 3 THEN now() - interval '1 second' END
      FROM episode_group g, generate_series(0, :size - 1) AS i WHERE g.state = 'OPEN'
    """,
    """
    INSERT INTO turn (id, episode_id, attempt, index, finish_reason, num_suffix, num_sampled, version_spans, digest,
                      messages, engine, latency_ms)
    SELECT (id - 1) * :turns + n + 1, id, 1, n, 'stop', 3, 3, '[{"version": 0, "start": 0, "end": 3}]', '', '[]',
           'http://engine', 7
      FROM episode, generate_series(0, :turns - 1) AS n WHERE num_turns > 0
    """,
    """
    INSERT INTO turn_tokens (turn_id, suffix_ids, sampled_ids, logprobs) SELECT id, :three, :three, :three FROM turn
    """,
    """
    INSERT INTO episode_event (episode_id, attempt, to_state) SELECT id, 1, 'NEW' FROM episode
    """,
    """
    INSERT INTO sandbox (episode_id, attempt, backend, node, handle, destroyed_at)
    SELECT id, 1, 'bubblewrap', 'node', 'box', CASE WHEN state = 'SCORED' THEN now() END
      FROM episode WHERE id % 4 = 0
    """,
)
_SEQUENCES = ("train_step", "episode_group", "episode", "turn")


def fill(database: Database, run_id: int, size: Size) -> None:
    """Give the run its long past. It must be the only one, without groups, with six tasks at least."""
    params = {
        "run": run_id,
        "num_groups": size.num_groups,
        "size": GROUP_SIZE,
        "per_step": GROUPS_PER_STEP,
        "num_steps": size.num_steps,
        "num_final": size.num_final,
        "num_complete": NUM_COMPLETE,
        "turns": size.turns_per_episode,
        "three": bytes(12),
    }
    with database.begin() as conn:
        # The rows fit by construction: checking millions of foreign keys would take longer than all the rest.
        conn.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in _FILL:
            conn.execute(text(statement), params)
        for table in _SEQUENCES:
            conn.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("VACUUM ANALYZE"))
