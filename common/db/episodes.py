"""Episodes: claim, renew, move, announce again. Every move is compare-and-set and leaves an event.

The claim token is the fence: a worker whose lease was taken finds its token gone, and its writes raise LeaseLost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy import Connection, Row, text

from common.config import RolloutConfig, RunConfig
from common.db import stragglers
from common.db.statement import Prepared
from common.db.stored_config import read_config
from common.episode import FINAL_STATES, MOVES, STAGE_OF, TAKES, EpisodeState, Stage
from common.errors import LeaseLost
from common.outcomes import Outcome


@dataclass(frozen=True, kw_only=True)
class Wakeup:
    """What a message on the broker says: this attempt of this episode waits for this stage."""

    stage: Stage
    episode_id: int
    attempt: int
    node: str | None = None
    """The node on which it must be done; None = on any."""

    @classmethod
    def of(cls, row: Row[Any]) -> Wakeup:
        """From an episode's row (id, attempt, state, node)."""
        state = EpisodeState(row.state)
        node = row.node if state is EpisodeState.READY else None
        return cls(stage=STAGE_OF[state], episode_id=row.id, attempt=row.attempt, node=node)


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
    transcript: list[list[dict[str, Any]]]
    """In EVAL the messages of each turn, without the first ones; [] before."""
    eval_version: int | None = None
    """The version that it evaluates: it plays only on engines that serve this one. None = it is for training."""

    @property
    def rollout(self) -> RolloutConfig:
        """How the episode is played: as the run trains, or as it evaluates."""
        return self.config.rollout if self.eval_version is None else self.config.eval_rollout


def claim(
    conn: Connection,
    wakeup: Wakeup,
    *,
    worker: str,
    token: UUID,
    lease_s: float,
    configs: MutableMapping[int, RunConfig],
    node: str | None = None,
) -> Claim | None:
    """Take the episode if it stands where the stage takes it, nobody holds it and its time has come; None otherwise.

    RUN takes none of a run that has no engine at all: it would only wait, and use up the episode's attempts; and none
    whose sandbox lies on another node than `node`, the worker's. None = only such as may be played anywhere. INIT makes
    no second sandbox of an episode on a node without RUN while there is another one.

    `configs` are run configurations that the caller's process has read before, by run id; one that is not among them is
    read first, and added. Raises UnreadableConfig where it cannot be: the episode is not taken, and waits.
    """
    given = {
        "id": wakeup.episode_id,
        "attempt": wakeup.attempt,
        "worker": worker,
        "token": token,
        "lease_s": lease_s,
        "node": node,
    }
    known = list(configs)
    row = _CLAIM[wakeup.stage].first(conn, {**given, "known": known})
    # By what was known then: another thread may have read it meanwhile, and the message would be lost.
    if row is None and _learn(conn, wakeup, configs, known=known):
        row = _CLAIM[wakeup.stage].first(conn, {**given, "known": list(configs)})
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
        config=configs[row.run_id],
        handler=handler,
        payload=payload,
        # A new attempt still carries the old one's: the processes that start it may not write this column.
        prepared=None if wakeup.stage is Stage.INIT else row.prepared,
        num_turns=row.num_turns,
        outcome=row.outcome,
        transcript=row.transcript or [],
        eval_version=row.eval_version,
    )


def _learn(conn: Connection, wakeup: Wakeup, configs: MutableMapping[int, RunConfig], *, known: list[int]) -> bool:
    """Read the configuration of the episode's run; False = it is known, or the episode is gone. Costs no claim."""
    row = _UNKNOWN_RUN.first(conn, {"known": known, "id": wakeup.episode_id, "attempt": wakeup.attempt})
    if row is None:
        return False
    configs[row.id] = read_config(row.name, row.config)
    return True


_TYPES = {
    "id": "bigint",
    "attempt": "smallint",
    "worker": "text",
    "node": "text",
    "token": "uuid",
    "lease_s": "float8",
    "known": "bigint[]",
    "to": "text",
    "why": "text",
    "prepared": "jsonb",
    "outcome": "text",
    "reward": "float8",
    "reward_parts": "jsonb",
}


_RUN_LIVES = "SELECT FROM node WHERE seen_at > now() - {num} * :lease_s * interval '1 second'"
_PREPARABLE = f"""
    AND (e.attempt = 1 OR e.prepared IS NULL OR e.prepared -> 'sandbox' = 'null'
         OR e.prepared -> 'spec' -> 'endpoint' <> 'null' OR NOT EXISTS ({_RUN_LIVES.format(num=1)})
         OR EXISTS ({_RUN_LIVES.format(num=4)} AND name = :node))"""
"""The second sandbox of an episode is made where somebody can use it: the first one's node may have lost its RUN fleet
and kept INIT."""
_PLAYABLE = "AND EXISTS (SELECT FROM engine WHERE run_id = e.run_id) AND (e.node IS NULL OR e.node = :node)"


_WHERE = {Stage.INIT: _PREPARABLE, Stage.RUN: _PLAYABLE}


def _claim(stage: Stage) -> Prepared:
    # Only EVAL's role reads turns besides RUN's.
    transcript = "SELECT jsonb_agg(messages ORDER BY index) FROM turn WHERE episode_id = e.id AND attempt = e.attempt"
    return Prepared(
        f"""
        UPDATE episode e
           SET claim_worker = :worker, claim_token = :token, lease_until = now() + :lease_s * interval '1 second',
               not_before = NULL
         WHERE e.id = :id AND e.attempt = :attempt AND e.state = '{TAKES[stage]}' AND e.claim_token IS NULL
           AND e.run_id = ANY(:known)
           AND (e.not_before IS NULL OR e.not_before <= now())
           {_WHERE.get(stage, "")}
        RETURNING e.group_id, e.run_id, e.prepared, e.num_turns, e.outcome, e.eval_version,
                  ({transcript if stage is Stage.EVAL else "NULL"}) AS transcript,
                  (SELECT jsonb_build_array(handler, payload) FROM task
                    WHERE id = (SELECT task_id FROM episode_group WHERE id = e.group_id)) AS task
        """,
        _TYPES,
    )


_CLAIM = {stage: _claim(stage) for stage in Stage}
_UNKNOWN_RUN = Prepared(
    """
    SELECT r.id, r.name, r.config FROM episode e JOIN run r ON r.id = e.run_id
     WHERE e.id = :id AND e.attempt = :attempt AND e.claim_token IS NULL AND r.id <> ALL(:known)
    """,
    _TYPES,
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
    return to is EpisodeState.SCORED and claim.eval_version is None and claim.rollout.oversample > 0


def move(
    conn: Connection,
    claim: Claim,
    to: EpisodeState,
    *,
    why: str,
    prepared: Mapping[str, Any] | None = None,
    node: str | None = None,
    outcome: Outcome | None = None,
    reward: float | None = None,
    reward_parts: Mapping[str, float] | None = None,
) -> Wakeup | None:
    """End the claim by moving the episode on; returns the message for the next stage, None in a final state.

    `node` is where INIT has made its sandbox, if that can be used there alone.
    A score that is the last which an over-sampled group wants cancels the group's other episodes. It locks them before
    its own row: nothing in the transaction may have locked a group, or an episode of a greater id, before.
    Raises LeaseLost if the claim no longer holds.
    """
    at = TAKES[claim.stage]
    assert to in MOVES[at], f"{at} -> {to} is not a move"
    results = {
        "prepared": json.dumps(prepared) if prepared is not None else None,
        "node": node,
        "outcome": outcome,
        "reward": reward,
        "reward_parts": json.dumps(reward_parts) if reward_parts is not None else None,
    }
    may_complete = leaves_stragglers(claim, to)
    if may_complete:
        stragglers.hold_siblings(conn, claim.group_id)
    results = {name: value for name, value in results.items() if value is not None}
    row = _move(at, to, tuple(results)).first(
        conn,
        {
            "id": claim.episode_id,
            "token": claim.token,
            "attempt": claim.attempt,
            "worker": claim.worker,
            "why": why,
            **results,
        },
    )
    if row is None:
        raise LeaseLost(f"episode {claim.episode_id} attempt {claim.attempt}: the claim of {claim.worker} is gone")
    if may_complete:
        stragglers.cancel_rest(conn, claim.group_id)
    if to in FINAL_STATES:
        return None
    return Wakeup(stage=STAGE_OF[to], episode_id=claim.episode_id, attempt=claim.attempt, node=node)


@cache
def _move(at: EpisodeState, to: EpisodeState, results: tuple[str, ...]) -> Prepared:
    """One statement for the move and all that goes with it: each costs a round trip, three times per episode.

    Only what the stage has made is named: its role may not write the other columns, not even with NULL.
    """
    final = to in FINAL_STATES
    counted = f"""
        , counted AS (
            UPDATE episode_group g SET {_COUNT_SET.format(num="1")} FROM moved WHERE g.id = moved.group_id
        )"""
    return Prepared(
        f"""
        WITH moved AS (
            UPDATE episode
               SET state = '{to}', {UNCLAIM}{", finished_at = clock_timestamp()" if final else ""}
                   {"".join(f", {name} = :{name}" for name in results)}
             WHERE id = :id AND claim_token = :token AND state = '{at}' AND attempt = :attempt
            RETURNING id, group_id
        ), noted AS (
            INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
            SELECT id, :attempt, '{at}', '{to}', :worker, :why FROM moved
        ){counted if final else ""}
        SELECT id FROM moved
        """,
        _TYPES,
    )


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
            RETURNING id, attempt, state, node
            """
        ),
        {"after_s": after_s, "limit": limit},
    )
    return [Wakeup.of(row) for row in rows]


UNCLAIM = "claim_worker = NULL, claim_token = NULL, lease_until = NULL, enqueued_at = now()"
"""How every claim ends: whoever moves the episode announces it."""
_COUNT_SET = """num_final = num_final + {num},
                       state = CASE WHEN num_final + {num} = size THEN 'COMPLETE' ELSE state END,
                       completed_at = CASE WHEN num_final + {num} = size THEN clock_timestamp() END"""


def count_final(conn: Connection, group_ids: list[int]) -> None:
    """Count episodes that have become final, in their groups: one id for each episode."""
    for group_id, num in sorted(Counter(group_ids).items()):
        conn.execute(
            text(f"UPDATE episode_group SET {_COUNT_SET.format(num=':num')} WHERE id = :id"),
            {"id": group_id, "num": num},
        )
