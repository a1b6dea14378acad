"""Questions that people ask of a run, as SQL on tables and views; the final report shows them with their answers."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from common.errors import SetupError

STATEMENT_TIMEOUT_S = 60
OPEN_STATEMENT = """
DO $$
DECLARE answer refcursor := 'answer';
BEGIN
    OPEN answer FOR EXECUTE current_setting('rollmill.statement');
END
$$
"""
NO_CURSOR = "42P11"
"""SQLSTATE of what is not one statement with rows."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question and the SQL that answers it."""

    title: str
    sql: str
    """With `:run` where the run's name belongs."""

    def for_run(self, run: str) -> str:
        """The statement to copy and paste. A run's name holds nothing that would need quoting."""
        return self.sql.replace(":run", f"'{run}'")


EXAMPLES = tuple(
    Example(title=title, sql=textwrap.dedent(sql).strip())
    for title, sql in (
        (
            "Does the policy learn?",
            """
            SELECT version, episodes, round(mean_reward::numeric, 3) AS mean_reward,
                   round(mean_turns, 2) AS mean_turns, round(mean_tokens, 1) AS mean_tokens
              FROM reward_by_version WHERE run = :run ORDER BY version
            """,
        ),
        (
            "Which tasks never succeed?",
            """
            SELECT k.key AS task, count(*) AS episodes, max(e.version_min) AS newest_version,
                   string_agg(DISTINCT e.outcome, ', ') AS outcomes
              FROM episode e
              JOIN run r ON r.id = e.run_id
              JOIN episode_group g ON g.id = e.group_id
              JOIN task k ON k.id = g.task_id
             WHERE r.name = :run AND e.state = 'SCORED'
             GROUP BY k.id HAVING max(e.reward) <= 0
             ORDER BY newest_version DESC, episodes DESC, k.id LIMIT 50
            """,
        ),
        (
            "Where does an episode's time go, waiting in queues included?",
            """
            SELECT stage, count(seconds) AS episodes, round(avg(seconds), 3) AS mean_s,
                   round(percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds)::numeric, 3) AS median_s,
                   round(percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds)::numeric, 3) AS p95_s,
                   round(max(seconds), 3) AS max_s
              FROM episode_timings
             CROSS JOIN LATERAL (VALUES (1, 'INIT', init_s), (2, 'RUN', run_s), (3, 'EVAL', eval_s))
                     AS stages (number, stage, seconds)
             WHERE run = :run GROUP BY number, stage ORDER BY number
            """,
        ),
        (
            "What did the newest successful episode say, with its token ids and log-probs?",
            """
            SELECT turn, concat_ws(' ', nullif(messages #>> '{0,content}', ''), messages #>> '{0,tool_calls,0,name}',
                                   messages #>> '{0,tool_calls,0,arguments}') AS agent,
                   messages #>> '{1,content}' AS tool, sampled_ids, logprobs
              FROM turns
             WHERE run = :run AND episode_id = (
                   SELECT e.id FROM episode e JOIN run r ON r.id = e.run_id
                    WHERE r.name = :run AND e.state = 'SCORED'
                    ORDER BY e.reward DESC, e.version_min DESC, e.num_turns DESC, e.id DESC LIMIT 1)
             ORDER BY turn
            """,
        ),
        (
            "How stale was what was trained?",
            """
            SELECT lag, sum(episodes)::bigint AS episodes,
                   round(100 * sum(episodes) / sum(sum(episodes)) OVER (), 1) AS percent,
                   min(trained_version) AS first_version, max(trained_version) AS last_version
              FROM staleness WHERE run = :run GROUP BY lag ORDER BY lag
            """,
        ),
    )
)


MORE_EXAMPLES = tuple(
    Example(title=title, sql=textwrap.dedent(sql).strip())
    for title, sql in (
        (
            "What broke under the episodes, where, and with which last error?",
            """
            SELECT stage, kind, failures, episodes, failed_for_good, last_episode_id, last_error
              FROM failures_by_kind WHERE run = :run ORDER BY failures DESC, stage, kind
            """,
        ),
        (
            "Which episodes took longest, and where?",
            """
            SELECT episode_id, outcome, failures, round(init_s, 2) AS init_s, round(run_s, 2) AS run_s,
                   round(eval_s, 2) AS eval_s, round(total_s, 2) AS total_s
              FROM episode_timings WHERE run = :run AND total_s IS NOT NULL
             ORDER BY episode_timings.total_s DESC, episode_id LIMIT 10
            """,
        ),
        (
            "Where did the last day's time go: how many episodes did each stage finish a minute?",
            """
            SELECT minute, coalesce(sum(episodes) FILTER (WHERE stage = 'INIT'), 0) AS init,
                   coalesce(sum(episodes) FILTER (WHERE stage = 'RUN'), 0) AS run,
                   coalesce(sum(episodes) FILTER (WHERE stage = 'EVAL'), 0) AS eval
              FROM stage_throughput
             WHERE stage_throughput.run = :run AND minute > now() - interval '1 day'
             GROUP BY minute ORDER BY minute
            """,
        ),
        (
            "How long are the episodes of each version, in sampled tokens?",
            """
            SELECT e.version_min AS version, count(*) AS episodes, min(e.num_sampled) AS shortest,
                   percentile_disc(0.5) WITHIN GROUP (ORDER BY e.num_sampled) AS median,
                   percentile_disc(0.95) WITHIN GROUP (ORDER BY e.num_sampled) AS p95, max(e.num_sampled) AS longest,
                   round(100.0 * count(*) FILTER (WHERE e.outcome = 'token_limit') / count(*), 1) AS percent_cut
              FROM episode e JOIN run r ON r.id = e.run_id
             WHERE r.name = :run AND e.state = 'SCORED' AND e.version_min IS NOT NULL
             GROUP BY e.version_min ORDER BY e.version_min
            """,
        ),
        (
            "How did the siblings of the newest group with mixed rewards do?",
            """
            SELECT e.id AS episode_id, e.index, e.reward, x.advantage, e.outcome, e.num_turns, e.num_sampled
              FROM episode e LEFT JOIN trained_episode x ON x.episode_id = e.id
             WHERE e.group_id = (
                   SELECT m.group_id FROM episode m JOIN run r ON r.id = m.run_id
                    WHERE r.name = :run AND m.state = 'SCORED'
                    GROUP BY m.group_id HAVING min(m.reward) < max(m.reward) ORDER BY m.group_id DESC LIMIT 1)
             ORDER BY e.index
            """,
        ),
        (
            "What happened to the episode with the longest history?",
            """
            SELECT v.at, v.attempt, v.from_state, v.to_state, v.why, v.worker
              FROM episode_event v
             WHERE v.episode_id = (
                   SELECT h.episode_id FROM episode_event h JOIN episode e ON e.id = h.episode_id
                     JOIN run r ON r.id = e.run_id
                    WHERE r.name = :run GROUP BY h.episode_id ORDER BY count(*) DESC, h.episode_id LIMIT 1)
             ORDER BY v.id
            """,
        ),
        (
            "How did training go, step by step?",
            """
            SELECT version_in + 1 AS version, round((metrics ->> 'reward_mean')::numeric, 3) AS reward,
                   round((metrics ->> 'loss')::numeric, 4) AS loss,
                   round((metrics ->> 'entropy')::numeric, 4) AS entropy,
                   round((metrics ->> 'grad_norm')::numeric, 4) AS grad_norm,
                   round((metrics ->> 'lag_mean')::numeric, 2) AS lag,
                   (metrics ->> 'num_tokens')::float8::int AS tokens,
                   round((metrics ->> 'wait_s')::numeric, 2) AS wait_s,
                   round((metrics ->> 'train_s')::numeric, 2) AS train_s
              FROM train_step s JOIN run r ON r.id = s.run_id
             WHERE r.name = :run AND s.state = 'DONE' ORDER BY version_in
            """,
        ),
    )
)
"""Beside those of the report. All are in docs/queries.md, which `rollmill queries --markdown` writes."""


def run_example(conn: Connection, example: Example, run: str) -> Answer:
    """Ask the question of this run."""
    # `::type` is what people write in Postgres, but the colons would be taken for parameters.
    result = conn.execute(text(example.sql.replace("::", r"\:\:")), {"run": run})
    return Answer(columns=tuple(result.keys()), rows=tuple(tuple(row) for row in result))


def ask(conn: Connection, sql: str) -> Answer:
    """Run somebody's SQL, which may only read. Raises SetupError with Postgres's own message.

    The server opens it as a cursor, for which it takes a single statement that has rows: none that begins, ends or
    changes a transaction. A read-only transaction that has asked anything cannot be made a writing one, and it is
    rolled back: before Postgres 16, functions may write large objects all the same.
    """
    try:
        conn.execute(text("SET TRANSACTION READ ONLY"))
        conn.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'"))
        # All rows are wanted, not the first ones soon.
        conn.execute(text("SET LOCAL cursor_tuple_fraction = 1"))
        conn.execute(text("SELECT set_config('rollmill.statement', :sql, true)"), {"sql": sql})
        with conn.begin_nested() as nothing_kept:
            conn.execute(text(OPEN_STATEMENT))
            result = conn.execute(text("FETCH ALL FROM answer"))
            answer = Answer(columns=tuple(result.keys()), rows=tuple(tuple(row) for row in result))
            nothing_kept.rollback()
        return answer
    except DBAPIError as error:
        raise SetupError(f"the database refused: {_refusal(error, sql)}") from None


def _refusal(error: DBAPIError, sql: str) -> str:
    """Postgres's words, with the place in the statement where it names one; not those about our cursor."""
    report = getattr(error.orig, "diag", None)
    if report is None or report.message_primary is None:
        return str(error.orig).strip()
    if report.sqlstate == NO_CURSOR:
        return "give one statement that only reads: SELECT, WITH, VALUES, TABLE, SHOW or EXPLAIN"
    message = str(report.message_primary)
    if report.internal_position and report.internal_query == sql:
        before = sql[: int(report.internal_position) - 1]
        message += f" (line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))})"
    return ". ".join([message, *(more for more in (report.message_detail, report.message_hint) if more)])
