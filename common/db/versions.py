"""Policy versions: what the trainer has published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, text

from common.config import InFlight
from common.config_train import TrainConfig
from common.db import evaluations
from common.weights import Published, folder_of


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """A published version of a run's weights."""

    run_id: int
    run: str
    """The run's name: part of the name under which engines serve the version."""
    number: int
    location: str
    """Path of its folder, or the URL below which its objects lie."""
    manifest_sha256: str
    in_flight: InFlight
    """What the run wants of requests under way while it is loaded."""
    adapters_kept: int | None
    """How many adapters an engine of the run keeps; None = the version is a whole model, not an adapter."""
    model: Path
    """Folder of the run's start weights, wherever the run was opened."""
    max_row_tokens: int | None
    """The run's rollout.max_row_tokens."""

    @property
    def path(self) -> Path:
        """Its folder, where the store is one."""
        return folder_of(self.location)


_SELECT = """
    SELECT v.run_id, r.name AS run, v.number, v.path AS location, v.manifest_sha256,
           coalesce(r.config #>> '{rollout,in_flight}', 'keep') AS in_flight, r.config -> 'train' AS train,
           r.config ->> 'model' AS model, CAST(r.config #>> '{rollout,max_row_tokens}' AS int) AS max_row_tokens
      FROM policy_version v JOIN run r ON r.id = v.run_id
"""
_READ_BY_ENGINE = """
    (v.number IN (e.version, e.loading) OR (
        r.config #>> '{train,lora_rank}' IS NOT NULL
        AND v.number > least(e.version, e.loading) - 2 * (CAST(r.config #>> '{train,max_staleness}' AS int) + 2)
        AND v.number <= greatest(e.version, e.loading)
    ))
"""
"""Engines read an adapter's folder again when they need it and have put it away: so each keeps the folders of twice as
many as it holds by itself, for requests that have been under way for so long."""


def newest(conn: Connection, run_id: int) -> PolicyVersion | None:
    """The run's newest version; None before the trainer has published its start weights."""
    row = conn.execute(
        text(_SELECT + " WHERE v.run_id = :run_id ORDER BY v.number DESC LIMIT 1"), {"run_id": run_id}
    ).first()
    return _version(row) if row else None


def wanted(conn: Connection, run_id: int) -> PolicyVersion | None:
    """The version that the run's engines should serve: the newest, but none beyond one that is being evaluated."""
    row = conn.execute(
        text(
            _SELECT
            + """ WHERE v.run_id = :run_id
                   AND v.number <= coalesce((SELECT min(version) FROM evaluation_point
                                              WHERE run_id = :run_id AND finished_at IS NULL), v.number)
                 ORDER BY v.number DESC LIMIT 1"""
        ),
        {"run_id": run_id},
    ).first()
    return _version(row) if row else None


def publish(conn: Connection, run_id: int, number: int, published: Published) -> None:
    """Make a version known, and its evaluation with it if one is due.

    Publishing a number again replaces it: the folder was written anew.
    """
    conn.execute(
        text(
            """
            INSERT INTO policy_version (run_id, number, path, manifest_sha256)
            VALUES (:run_id, :number, :path, :sha)
            ON CONFLICT (run_id, number) DO UPDATE SET path = excluded.path, manifest_sha256 = excluded.manifest_sha256
            """
        ),
        {"run_id": run_id, "number": number, "path": published.location, "sha": published.manifest_sha256},
    )
    evaluations.open_if_due(conn, run_id, number)


def loadable(conn: Connection) -> list[PolicyVersion]:
    """Versions that an engine of any run serves, is about to, or may read again: their files are still needed."""
    rows = conn.execute(
        text(_SELECT + f" WHERE EXISTS (SELECT FROM engine e WHERE e.run_id = v.run_id AND {_READ_BY_ENGINE})")
    )
    return [_version(row) for row in rows]


def needed(conn: Connection, run_id: int) -> frozenset[int]:
    """Numbers of the versions that an engine may read, or that an open evaluation or unfinished episode names."""
    numbers = conn.execute(
        text(
            f"""
            SELECT v.number FROM policy_version v JOIN run r ON r.id = v.run_id JOIN engine e ON e.run_id = v.run_id
             WHERE v.run_id = :run_id AND {_READ_BY_ENGINE}
            UNION SELECT version FROM engine WHERE run_id = :run_id AND version IS NOT NULL
            UNION SELECT loading FROM engine WHERE run_id = :run_id AND loading IS NOT NULL
            UNION SELECT version FROM evaluation_point WHERE run_id = :run_id AND finished_at IS NULL
            UNION SELECT (span ->> 'version')::int
                    FROM episode e JOIN turn t ON t.episode_id = e.id AND t.attempt = e.attempt
                    CROSS JOIN LATERAL jsonb_array_elements(t.version_spans) span
                   WHERE e.run_id = :run_id AND e.state IN ('NEW', 'READY', 'SAMPLED')
            """
        ),
        {"run_id": run_id},
    )
    return frozenset(numbers.scalars())


def _version(row: Row[Any]) -> PolicyVersion:
    fields = dict(row._mapping)
    # Not validated: engines serve a run also where its configuration is refused, and one such run must stop no other.
    train = TrainConfig.model_construct(**fields.pop("train"))
    model = Path(fields.pop("model"))
    return PolicyVersion(**fields, model=model, adapters_kept=train.adapters_kept)
