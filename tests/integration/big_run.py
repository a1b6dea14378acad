"""A run of 200,000 episodes, nearly all of them long final: what the tables of a long run look like."""

from __future__ import annotations

from sqlalchemy import text

from tests.integration.world import World

NUM_GROUPS = 25_000
GROUP_SIZE = 8
GROUPS_PER_STEP = 8
NUM_STEPS = 3_108
NUM_FINAL = NUM_STEPS * GROUPS_PER_STEP
"""Groups that were trained or dropped; the next NUM_COMPLETE are complete, the rest have no final episode."""
NUM_COMPLETE = 36

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
    SELECT (g.id - 1) * :size + i + 1, :run, g.id, i, 'SCORED', 'finished', 0.5, version, version, 1, 3,
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
    SELECT id, id, 1, 0, 'stop', 3, 3, '[{"version": 0, "start": 0, "end": 3}]', '', '[]', 'http://engine', 7
      FROM episode WHERE num_turns = 1
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


def fill(world: World) -> None:
    """Give the world's run its long past."""
    params = {
        "run": world.run.id,
        "num_groups": NUM_GROUPS,
        "size": GROUP_SIZE,
        "per_step": GROUPS_PER_STEP,
        "num_steps": NUM_STEPS,
        "num_final": NUM_FINAL,
        "num_complete": NUM_COMPLETE,
        "three": bytes(12),
    }
    with world.database.begin() as conn:
        # The rows fit by construction: checking a million foreign keys would take longer than all the rest.
        conn.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in _FILL:
            conn.execute(text(statement), params)
        for table in _SEQUENCES:
            conn.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"))
    with world.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("VACUUM ANALYZE"))
