"""Turns: storing each under the episode's claim, and reading them back to go on or to train."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from sqlalchemy import Connection, text

from common.db.episodes import UNCLAIM, Claim, Wakeup
from common.db.statement import Prepared
from common.episode import (
    FinishReason,
    Message,
    Sampled,
    ScoredEpisode,
    Stage,
    Turn,
    TurnTokens,
    VersionSpan,
    ids_to_bytes,
    logprobs_to_bytes,
)
from common.errors import LeaseLost
from common.outcomes import Outcome


def save(conn: Connection, claim: Claim, turn: Turn) -> None:
    """Append a turn to the episode's attempt. Raises LeaseLost if the claim no longer holds.

    One statement. The update of the episode row is the fence: it locks the row until the turn is committed.
    """
    if _SAVE.first(conn, _row(claim, turn)) is None:
        raise LeaseLost(f"episode {claim.episode_id} turn {turn.index}: the claim of {claim.worker} is gone")


def save_last(conn: Connection, claim: Claim, turn: Turn, *, outcome: Outcome) -> Wakeup:
    """Append the agent's last turn and move the episode on to EVAL, in one statement; the message to send.

    Raises LeaseLost if the claim no longer holds.
    """
    if _SAVE_LAST.first(conn, {**_row(claim, turn), "worker": claim.worker, "outcome": outcome}) is None:
        raise LeaseLost(f"episode {claim.episode_id} turn {turn.index}: the claim of {claim.worker} is gone")
    return Wakeup(stage=Stage.EVAL, episode_id=claim.episode_id, attempt=claim.attempt)


def _storing(*, is_last: bool) -> Prepared:
    move = f", state = 'SAMPLED', outcome = :outcome, {UNCLAIM}"
    noted = """
        , noted AS (
            INSERT INTO episode_event (episode_id, attempt, from_state, to_state, worker, why)
            SELECT id, :attempt, 'READY', 'SAMPLED', :worker, :outcome FROM held
        )"""
    return Prepared(
        f"""
        WITH held AS (
            UPDATE episode
               SET num_turns = num_turns + 1, num_sampled = num_sampled + :num_sampled,
                   version_min = least(version_min, :oldest), version_max = greatest(version_max, :newest)
                   {move if is_last else ""}
             WHERE id = :episode_id AND claim_token = :token AND num_turns = :index AND state = 'READY'
            RETURNING id
        ), made AS (
            INSERT INTO turn (episode_id, attempt, index, sample, finish_reason, num_suffix, num_sampled,
                              version_spans, digest, messages, compacted, engine, latency_ms)
            SELECT id, :attempt, :index, :sample, :finish_reason, :num_suffix, :num_sampled,
                   :version_spans, :digest, :messages, :compacted, :engine, :latency_ms
              FROM held
            RETURNING id
        ), stored AS (
            INSERT INTO turn_tokens (turn_id, suffix_ids, sampled_ids, logprobs)
            SELECT id, :suffix_ids, :sampled_ids, :logprobs FROM made
        ){noted if is_last else ""}
        SELECT id FROM held
        """,
        {
            **dict.fromkeys(("num_sampled", "num_suffix", "latency_ms", "oldest", "newest"), "int"),
            **dict.fromkeys(("attempt", "index", "sample"), "smallint"),
            **dict.fromkeys(("version_spans", "messages", "compacted"), "jsonb"),
            **dict.fromkeys(("digest", "suffix_ids", "sampled_ids", "logprobs"), "bytea"),
            **dict.fromkeys(("finish_reason", "engine", "worker", "outcome"), "text"),
            "episode_id": "bigint",
            "token": "uuid",
        },
    )


_SAVE, _SAVE_LAST = _storing(is_last=False), _storing(is_last=True)


def _row(claim: Claim, turn: Turn) -> dict[str, object]:
    versions = [span.version for span in turn.sampled.spans]
    return {
        "episode_id": claim.episode_id,
        "token": claim.token,
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "attempt": claim.attempt,
        "index": turn.index,
        "sample": turn.sample,
        "finish_reason": turn.sampled.finish_reason,
        "num_suffix": len(turn.suffix_ids),
        "num_sampled": len(turn.sampled.ids),
        "version_spans": json.dumps([span.model_dump() for span in turn.sampled.spans]),
        "digest": turn.sampled.digest,
        "messages": _dump(turn.messages),
        "compacted": None if turn.compacted is None else _dump(turn.compacted),
        "engine": turn.engine,
        "latency_ms": turn.latency_ms,
        "suffix_ids": ids_to_bytes(turn.suffix_ids),
        "sampled_ids": ids_to_bytes(turn.sampled.ids),
        "logprobs": logprobs_to_bytes(turn.sampled.logprobs),
    }


def load(conn: Connection, episode_id: int, attempt: int) -> list[Turn]:
    """The stored turns of an attempt, in order."""
    rows = conn.execute(
        text(
            """
            SELECT t.index AS turn_index, t.sample, t.finish_reason, t.version_spans, t.messages, t.compacted,
                   t.engine, t.latency_ms, k.suffix_ids, k.sampled_ids, k.logprobs
              FROM turn t JOIN turn_tokens k ON k.turn_id = t.id
             WHERE t.episode_id = :episode_id AND t.attempt = :attempt ORDER BY t.index
            """
        ),
        {"episode_id": episode_id, "attempt": attempt},
    )
    return [
        Turn(
            index=row.turn_index,
            sample=row.sample,
            suffix_ids=tuple(np.frombuffer(row.suffix_ids, "<i4").tolist()),
            sampled=Sampled(
                ids=tuple(np.frombuffer(row.sampled_ids, "<i4").tolist()),
                logprobs=tuple(np.frombuffer(row.logprobs, "<f4").tolist()),
                spans=tuple(VersionSpan.model_validate(span) for span in row.version_spans),
                finish_reason=FinishReason(row.finish_reason),
            ),
            messages=_messages(row.messages),
            compacted=None if row.compacted is None else _messages(row.compacted),
            engine=row.engine,
            latency_ms=row.latency_ms,
        )
        for row in rows
    ]


def _dump(messages: Sequence[Message]) -> str:
    return json.dumps([message.model_dump() for message in messages])


def _messages(stored: list[dict[str, object]]) -> tuple[Message, ...]:
    return tuple(Message.model_validate(message) for message in stored)


def load_for_step(conn: Connection, step_id: int) -> list[ScoredEpisode]:
    """The SCORED episodes of a step's groups with their tokens, ordered by group and index.

    Those that ended before their first turn have none: left out, they would make their siblings look better or worse.
    """
    return _scored(conn, "g.step_id = :step_id", step_id=step_id)


def load_rewarded(conn: Connection, run_id: int, *, min_reward: float) -> list[ScoredEpisode]:
    """The SCORED training episodes of a run with at least this reward and their tokens, ordered by group and index."""
    return _scored(
        conn,
        "e.run_id = :run_id AND e.eval_version IS NULL AND e.reward >= :min_reward",
        run_id=run_id,
        min_reward=min_reward,
    )


def _scored(conn: Connection, where: str, **values: float) -> list[ScoredEpisode]:
    rows = conn.execute(
        text(
            f"""
            SELECT e.id, e.group_id, e.outcome, e.reward, t.sample, t.version_spans, k.suffix_ids, k.sampled_ids,
                   k.logprobs
              FROM episode_group g
              JOIN episode e ON e.group_id = g.id AND e.state = 'SCORED'
              LEFT JOIN (turn t JOIN turn_tokens k ON k.turn_id = t.id)
                     ON t.episode_id = e.id AND t.attempt = e.attempt
             WHERE {where}
             ORDER BY e.group_id, e.index, t.index
            """
        ),
        values,
    )
    episodes: dict[int, ScoredEpisode] = {}
    for row in rows:
        earlier = episodes.get(row.id)
        turns = () if row.suffix_ids is None else (_tokens(row.sample, row.version_spans, row),)
        episodes[row.id] = ScoredEpisode(
            episode_id=row.id,
            group_id=row.group_id,
            outcome=row.outcome,
            reward=row.reward,
            turns=(*(earlier.turns if earlier else ()), *turns),
        )
    return list(episodes.values())


def _tokens(sample: int, spans: list[dict[str, int]], row: object) -> TurnTokens:
    suffix, sampled, logprobs = (getattr(row, name) for name in ("suffix_ids", "sampled_ids", "logprobs"))
    return TurnTokens(
        sample=sample,
        suffix_ids=np.frombuffer(suffix, "<i4"),
        sampled_ids=np.frombuffer(sampled, "<i4"),
        logprobs=np.frombuffer(logprobs, "<f4"),
        versions=np.concatenate(
            [np.full(span["end"] - span["start"], span["version"], np.int32) for span in spans]
            or [np.empty(0, np.int32)]
        ),
    )
