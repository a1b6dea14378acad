"""Turns: storing each under the episode's claim, and reading them back to go on or to train."""

from __future__ import annotations

import json

import numpy as np
from sqlalchemy import Connection, text

from common.db.episodes import Claim
from common.episode import (
    FinishReason,
    Message,
    Sampled,
    ScoredEpisode,
    Turn,
    TurnTokens,
    VersionSpan,
    ids_to_bytes,
    logprobs_to_bytes,
)
from common.errors import LeaseLost


def save(conn: Connection, claim: Claim, turn: Turn) -> None:
    """Append a turn to the episode's attempt. Raises LeaseLost if the claim no longer holds.

    One statement. The update of the episode row is the fence: it locks the row until the turn is committed.
    """
    held = conn.execute(_SAVE, _row(claim, turn)).first()
    if held is None:
        raise LeaseLost(f"episode {claim.episode_id} turn {turn.index}: the claim of {claim.worker} is gone")


_SAVE = text(
    """
    WITH held AS (
        UPDATE episode
           SET num_turns = num_turns + 1, num_sampled = num_sampled + :num_sampled,
               version_min = least(version_min, :oldest), version_max = greatest(version_max, :newest)
         WHERE id = :episode_id AND claim_token = :token AND num_turns = :index
        RETURNING id
    ), made AS (
        INSERT INTO turn (episode_id, attempt, index, finish_reason, num_suffix, num_sampled, version_spans, digest,
                          messages, engine, latency_ms)
        SELECT id, :attempt, :index, :finish_reason, :num_suffix, :num_sampled, CAST(:version_spans AS jsonb), :digest,
               CAST(:messages AS jsonb), :engine, :latency_ms
          FROM held
        RETURNING id
    ), stored AS (
        INSERT INTO turn_tokens (turn_id, suffix_ids, sampled_ids, logprobs)
        SELECT id, :suffix_ids, :sampled_ids, :logprobs FROM made
    )
    SELECT id FROM held
    """
)


def _row(claim: Claim, turn: Turn) -> dict[str, object]:
    versions = [span.version for span in turn.sampled.spans]
    return {
        "episode_id": claim.episode_id,
        "token": claim.token,
        "oldest": min(versions, default=None),
        "newest": max(versions, default=None),
        "attempt": claim.attempt,
        "index": turn.index,
        "finish_reason": turn.sampled.finish_reason,
        "num_suffix": len(turn.suffix_ids),
        "num_sampled": len(turn.sampled.ids),
        "version_spans": json.dumps([span.model_dump() for span in turn.sampled.spans]),
        "digest": turn.sampled.digest,
        "messages": json.dumps([message.model_dump() for message in turn.messages]),
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
            SELECT t.index AS turn_index, t.finish_reason, t.version_spans, t.messages, t.engine, t.latency_ms,
                   k.suffix_ids, k.sampled_ids, k.logprobs
              FROM turn t JOIN turn_tokens k ON k.turn_id = t.id
             WHERE t.episode_id = :episode_id AND t.attempt = :attempt ORDER BY t.index
            """
        ),
        {"episode_id": episode_id, "attempt": attempt},
    )
    return [
        Turn(
            index=row.turn_index,
            suffix_ids=tuple(np.frombuffer(row.suffix_ids, "<i4").tolist()),
            sampled=Sampled(
                ids=tuple(np.frombuffer(row.sampled_ids, "<i4").tolist()),
                logprobs=tuple(np.frombuffer(row.logprobs, "<f4").tolist()),
                spans=tuple(VersionSpan.model_validate(span) for span in row.version_spans),
                finish_reason=FinishReason(row.finish_reason),
            ),
            messages=tuple(Message.model_validate(message) for message in row.messages),
            engine=row.engine,
            latency_ms=row.latency_ms,
        )
        for row in rows
    ]


def load_transcript(conn: Connection, episode_id: int, attempt: int) -> tuple[Message, ...]:
    """What the agent said and what the tools answered, in order, without the first messages."""
    rows = conn.execute(
        text("SELECT messages FROM turn WHERE episode_id = :episode_id AND attempt = :attempt ORDER BY index"),
        {"episode_id": episode_id, "attempt": attempt},
    )
    return tuple(Message.model_validate(message) for row in rows for message in row.messages)


def load_for_step(conn: Connection, step_id: int) -> list[ScoredEpisode]:
    """The SCORED episodes of a step's groups with their tokens, ordered by group and index."""
    rows = conn.execute(
        text(
            """
            SELECT e.id, e.group_id, e.outcome, e.reward, t.version_spans, k.suffix_ids, k.sampled_ids, k.logprobs
              FROM episode_group g
              JOIN episode e ON e.group_id = g.id AND e.state = 'SCORED'
              JOIN turn t ON t.episode_id = e.id AND t.attempt = e.attempt
              JOIN turn_tokens k ON k.turn_id = t.id
             WHERE g.step_id = :step_id
             ORDER BY e.group_id, e.index, t.index
            """
        ),
        {"step_id": step_id},
    )
    episodes: dict[int, ScoredEpisode] = {}
    for row in rows:
        earlier = episodes.get(row.id)
        episodes[row.id] = ScoredEpisode(
            episode_id=row.id,
            group_id=row.group_id,
            outcome=row.outcome,
            reward=row.reward,
            turns=(*(earlier.turns if earlier else ()), _tokens(row.version_spans, row)),
        )
    return list(episodes.values())


def _tokens(spans: list[dict[str, int]], row: object) -> TurnTokens:
    suffix, sampled, logprobs = (getattr(row, name) for name in ("suffix_ids", "sampled_ids", "logprobs"))
    return TurnTokens(
        suffix_ids=np.frombuffer(suffix, "<i4"),
        sampled_ids=np.frombuffer(sampled, "<i4"),
        logprobs=np.frombuffer(logprobs, "<f4"),
        versions=np.concatenate(
            [np.full(span["end"] - span["start"], span["version"], np.int32) for span in spans]
            or [np.empty(0, np.int32)]
        ),
    )
