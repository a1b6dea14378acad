"""Files that RUN hands over to EVAL with an episode: bounded, compressed, one row for each attempt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db import sandboxes
from common.db.episodes import Claim


@dataclass(frozen=True, kw_only=True)
class StoredFiles:
    """What an attempt's agent handed in."""

    content: bytes
    """As it was stored."""
    left_out: Mapping[str, int]


def save(conn: Connection, claim: Claim, *, content: bytes, num_files: int, left_out: Mapping[str, int]) -> None:
    """Store an attempt's files; what the same attempt stored before is replaced. Raises LeaseLost."""
    sandboxes.check_claim(conn, claim)
    conn.execute(
        text(
            """
            INSERT INTO episode_files (episode_id, attempt, num_files, left_out, content)
            VALUES (:episode_id, :attempt, :num_files, CAST(:left_out AS jsonb), :content)
            ON CONFLICT (episode_id, attempt) DO UPDATE
               SET num_files = excluded.num_files, left_out = excluded.left_out, content = excluded.content
            """
        ),
        {
            "episode_id": claim.episode_id,
            "attempt": claim.attempt,
            "num_files": num_files,
            "left_out": json.dumps(dict(left_out)),
            "content": content,
        },
    )


def load(conn: Connection, episode_id: int, attempt: int) -> StoredFiles | None:
    """An attempt's files; None = it handed over none."""
    row = conn.execute(
        text("SELECT content, left_out FROM episode_files WHERE episode_id = :id AND attempt = :attempt"),
        {"id": episode_id, "attempt": attempt},
    ).first()
    return None if row is None else StoredFiles(content=bytes(row.content), left_out=row.left_out)
