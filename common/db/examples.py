"""Questions that people ask of a run, as SQL on tables and views; the final report shows them with their answers."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from common.errors import SetupError

STATEMENT_TIMEOUT_S = 60


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
              FROM samples
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


def run_example(conn: Connection, example: Example, run: str) -> Answer:
    """Ask the question of this run."""
    # `::type` is what people write in Postgres, but the colons would be taken for parameters.
    result = conn.execute(text(example.sql.replace("::", r"\:\:")), {"run": run})
    return Answer(columns=tuple(result.keys()), rows=tuple(tuple(row) for row in result))


def ask(conn: Connection, sql: str) -> Answer:
    """Run somebody's SQL in a transaction that may only read. Raises SetupError with Postgres's own message."""
    try:
        conn.execute(text("SET TRANSACTION READ ONLY"))
        conn.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'"))
        # Without parameters a % in the statement is just a %.
        result = conn.execution_options(no_parameters=True).exec_driver_sql(sql)
        if not result.returns_rows:
            return Answer(columns=(), rows=())
        return Answer(columns=tuple(result.keys()), rows=tuple(tuple(row) for row in result))
    except DBAPIError as error:
        raise SetupError(f"the database refused: {str(error.orig).strip()}") from None
