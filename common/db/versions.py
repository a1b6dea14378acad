"""Policy versions: what the trainer has published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, text

from common.config import InFlight
from common.weights import Published


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """A published version of a run's weights."""

    run_id: int
    run: str
    """The run's name: part of the name under which engines serve the version."""
    number: int
    path: Path
    manifest_sha256: str
    in_flight: InFlight
    """What the run wants of requests under way while it is loaded."""


_SELECT = """
    SELECT v.run_id, r.name AS run, v.number, v.path, v.manifest_sha256,
           coalesce(r.config #>> '{rollout,in_flight}', 'keep') AS in_flight
      FROM policy_version v JOIN run r ON r.id = v.run_id
"""


def newest(conn: Connection, run_id: int) -> PolicyVersion | None:
    """The run's newest version; None before the trainer has published its start weights."""
    row = conn.execute(
        text(_SELECT + " WHERE v.run_id = :run_id ORDER BY v.number DESC LIMIT 1"), {"run_id": run_id}
    ).first()
    return (
        PolicyVersion(
            run_id=row.run_id,
            run=row.run,
            number=row.number,
            path=Path(row.path),
            manifest_sha256=row.manifest_sha256,
            in_flight=row.in_flight,
        )
        if row
        else None
    )


def publish(conn: Connection, run_id: int, number: int, published: Published) -> None:
    """Make a version known. Publishing a number again replaces it: the folder was written anew."""
    conn.execute(
        text(
            """
            INSERT INTO policy_version (run_id, number, path, manifest_sha256)
            VALUES (:run_id, :number, :path, :sha)
            ON CONFLICT (run_id, number) DO UPDATE SET path = excluded.path, manifest_sha256 = excluded.manifest_sha256
            """
        ),
        {"run_id": run_id, "number": number, "path": str(published.path), "sha": published.manifest_sha256},
    )
