"""Episodes: claim, renew, move, announce again. Every move is compare-and-set and leaves an event.

The claim token is the fence: a worker whose lease was taken finds its token gone, and its writes raise LeaseLost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy import Connection, text

from common.config import RunConfig
from common.db import stragglers
from common.db.statement import statement
from common.episode import FINAL_STATES, MOVES, STAGE_OF, TAKES, EpisodeState, Stage
from common.errors import LeaseLost
from common.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Wakeup:
    """What a message on the broker says: this attempt of this episode waits for this stage."""

    stage: Stage
    episode_id: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An episode that this process works on, with what its stage needs to know."""

    stage: Stage
    episode_id: int
    attempt: int
    token: UUID
    worker: str
    group_id: int
    run_id: int
    config: RunConfig
    handler: str
    payload: dict[str, JsonValue]
    prepared: dict[str, Any] | None
    """INIT's result; None in INIT."""
    num_turns: int
    """Turns that this attempt has stored."""
    outcome: str | None
    """RUN's outcome; None before EVAL."""


def claim(
    conn: Connection, wakeup: Wakeup, *, worker: str, token: UUID, lease_s: float, configs: Mapping[int, RunConfig]
) -> Claim | None:
    """Take the episode if it stands where the stage takes it, nobody holds it and its time has come; None otherwise.

    RUN takes none of a run that has no engine at all: it would only wait, and use up the episode's attempts.

    `configs` are run configurations that the caller has parsed before, by run id.
    """
    # Subqueries, since a join of the tables takes the server longer to plan than to carry out.
    row = conn.execute(
        statement(
            """
            UPDATE episode e
               SET claim_worker = :worker, claim_token = :token, lease_until = now() + :lease_s * interval '1 second',
                   not_before = NULL
             WHERE e.id = :id AND e.attempt = :attempt AND e.state = :takes AND e.claim_token IS NULL
               AND (e.not_before IS NULL OR e.not_before <= now())
               AND (:takes <> 'READY' OR EXISTS (SELECT FROM engine WHERE run_id = e.run_id))
            RETURNING e.group_id, e.run_id, e.prepared, e.num_turns, e.outcome,
                      (SELECT jsonb_build_array(handler, payload) FROM task
                        WHERE id = (SELECT task_id FROM episode_group WHERE id = e.group_id)) AS task,
                      (SELECT config FROM run WHERE id = e.run_id AND id <> ALL(CAST(:known AS bigint[]))) AS config
            """
        ),
        {
            "known": list(configs),
            "id": wakeup.episode_id,
            "attempt": wakeup.attempt,
            "takes": TAKES[wakeup.stage],
            "worker": worker,
            "token": token,
            "lease_s": lease_s,
        },
    ).first()
    if row is None:
        return None
    handler, payload = row.task
    return Claim(
        stage=wakeup.stage,
        episode_id=wakeup.episode_id,
        attempt=wakeup.attempt,
        token=token,
        worker=worker,
        group_id=row.group_id,
        run_id=row.run_id,
        config=configs[row.run_id] if row.config is None else RunConfig.model_validate(row.config),
        handler=handler,
        payload=payload,
        # A new attempt still carries the old one's: the processes that start it may not write this column.
        prepared=None if wakeup.stage is Stage.INIT else row.prepared,
        num_turns=row.num_turns,
        outcome=row.outcome,
    )


def renew(conn: Connection, tokens: Collection[UUID], *, lease_s: float) -> set[UUID]:
    """Prolong the leases of these claims in one statement; returns those that still hold.

    Rows are locked in the order of their ids, as a cancellation does: in any other, the two could wait for each other.
    """
    rows = conn.execute(
        text(
            """
            WITH held AS (
                SELECT id FROM episode WHERE claim_token = ANY(CAST(:tokens AS uuid[])) ORDER BY id FOR UPDATE
            )
            UPDATE episode e SET lease_until = now() + :lease_s * interval '1 second'
              FROM held WHERE e.id = held.id RETURNING e.claim_token
            """
        ),
        {"tokens": [str(token) for token in tokens], "lease_s": lease_s},
    )
    return {row.claim_token for row in rows}


def leaves_stragglers(claim: Claim, to: EpisodeState) -> bool:
    """Whether this move may complete a group before its time, which takes several statements: a transaction."""
    return to is EpisodeState.SCORED and claim.config.rollout.oversample > 0


def move(
    conn: Connection,
    claim: Claim,
    to: EpisodeState,
    *,
    why: str,
    prepared: Mapping[str, Any] | None = None,
    outcome: Outcome | None = None,
    reward: float | None = None,
    reward_parts: Mapping[str, float] | None = None,
) -> Wakeup | None:
    """End the claim by moving the episode on; returns the message for the next stage, None in a final state.

    A score that is the last which an over-sampled group wants cancels the group's other episodes. It locks them before
    its own row: nothing in the transaction may have locked a group, or an episode of a greater id, before.
    Raises LeaseLost if the claim no longer holds.
    """
    at = TAKES[claim.stage]
    assert to in MOVES[at], f"{at} -> {to} is not a move"
    results = {
        "prepared": json.dumps(prepared) if prepared is not None else None,
        "outcome": outcome,
        "reward": reward,
        "reward_parts": json.dumps(reward_parts) if reward_parts is not None else None,
    }
    may_complete = leaves_stragglers(claim, to)
    if may_complete:
        stragglers.hold_siblings(conn, claim.group_id)
    # Only what the stage has made is named: its role may not write the other columns, not even with NULL.
    given = "".join(f", {_SET_RESULT[name]}" for name, value in results.items() if value is not None)
    final = to in FINAL_STATES
    # One statement for the move and all that goes with it: each costs a round trip, three times per episode.
    row = conn.execute(
        statement(
            f"""
            WITH moved AS (
                UPDATE episode
                   SET state = :to, claim_worker = NULL, claim_token = NULL, lease_until = NULL, enqueued_at = now(),
                       finished_at = CASE WHEN :final THEN clock_timestamp() END{given}
                 WHERE id = :id AND claim_token = :token AND state = :at AND attempt = :attempt
                RETURNING id, group_id
            ), noted AS (
                INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
                SELECT id, :attempt, :at, :to, :worker, :why FROM moved
            ){_COUNT_MOVED if final else ""}
            SELECT id FROM moved
            """
        ),
        {
            "id": claim.episode_id,
            "token": claim.token,
            "at": at,
            "attempt": claim.attempt,
            "to": to,
            "final": final,
            "worker": claim.worker,
            "why": why,
            **{name: value for name, value in results.items() if value is not None},
        },
    ).first()
    if row is None:
        raise LeaseLost(f"episode {claim.episode_id} attempt {claim.attempt}: the claim of {claim.worker} is gone")
    if may_complete:
        stragglers.cancel_rest(conn, claim.group_id)
    if final:
        return None
    return Wakeup(stage=STAGE_OF[to], episode_id=claim.episode_id, attempt=claim.attempt)


def resend(conn: Connection, *, after_s: float, limit: int = 500) -> list[Wakeup]:
    """Unclaimed episodes announced longer than `after_s` ago, whose message may be lost, and those that waited enough.

    Episodes of a run without an engine stand still until it gets one.
    """
    rows = conn.execute(
        text(
            """
            WITH lost AS (
                SELECT id FROM episode
                 WHERE claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED') AND not_before IS NULL
                   AND enqueued_at < now() - :after_s * interval '1 second' AND run_id IN (SELECT run_id FROM engine)
                 ORDER BY enqueued_at LIMIT :limit FOR UPDATE SKIP LOCKED
            ), due AS (
                SELECT id FROM episode
                 WHERE claim_token IS NULL AND state IN ('NEW', 'READY', 'SAMPLED') AND not_before <= now()
                   AND run_id IN (SELECT run_id FROM engine)
                 ORDER BY not_before LIMIT :limit FOR UPDATE SKIP LOCKED
            )
            UPDATE episode SET enqueued_at = now(), not_before = NULL
             WHERE id IN (SELECT id FROM lost UNION ALL SELECT id FROM due)
            RETURNING id, attempt, state
            """
        ),
        {"after_s": after_s, "limit": limit},
    )
    return [Wakeup(stage=STAGE_OF[EpisodeState(r.state)], episode_id=r.id, attempt=r.attempt) for r in rows]


_COUNT_SET = """num_final = num_final + {num},
                       state = CASE WHEN num_final + {num} = size THEN 'COMPLETE' ELSE state END,
                       completed_at = CASE WHEN num_final + {num} = size THEN clock_timestamp() END"""
_COUNT_MOVED = f""", counted AS (
                UPDATE episode_group g SET {_COUNT_SET.format(num="1")} FROM moved WHERE g.id = moved.group_id
            )"""
_SET_RESULT = {
    "prepared": "prepared = CAST(:prepared AS jsonb)",
    "outcome": "outcome = :outcome",
    "reward": "reward = :reward",
    "reward_parts": "reward_parts = CAST(:reward_parts AS jsonb)",
}


def count_final(conn: Connection, group_ids: list[int]) -> None:
    """Count episodes that have become final, in their groups: one id for each episode."""
    for group_id, num in sorted(Counter(group_ids).items()):
        conn.execute(
            text(f"UPDATE episode_group SET {_COUNT_SET.format(num=':num')} WHERE id = :id"),
            {"id": group_id, "num": num},
        )
