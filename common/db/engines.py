"""Engines: registering, owning, what they serve and how they fare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from common.episode import EngineState


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """An engine as stored."""

    id: int
    url: str
    run_id: int
    state: EngineState
    version: int | None
    """Policy version that it serves; None = not yet loaded, or not known."""
    answered: bool = True
    """Since it was registered last, and well."""
    newest: int | None = None
    """The newest version of its run, where it was asked for; None = none is published."""


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """An engine for people's eyes."""

    url: str
    run: str | None
    """The run's name."""
    state: EngineState
    version: int | None
    """None = none of its run's."""
    newest: int | None
    """The newest version of its run; None = none is published."""
    wire: str | None
    """The language in which it answers; None = it has not answered its keeper."""
    healthy_s: float | None
    """Seconds since it last answered its keeper; None = never since it was registered last."""
    error: str | None
    """Of the last probe or load that failed, until one succeeds."""
    num_loads: int
    num_refusals: int
    """Loads refused since it was registered first: the version is damaged or does not fit."""
    num_failures: int
    """Times that it failed otherwise, each until it answers again; before its first answer none is counted."""


@dataclass(frozen=True, kw_only=True)
class Lag:
    """An engine that is further behind its run's newest version than the run allows."""

    version: int
    newest: int
    max_staleness: int


WEIGHTS_RETRY_S = 1.0
"""How long after a version could not be had it is asked for again."""
_COLUMNS = "id, url, run_id, state, version, healthy_at IS NOT NULL AS answered"
_NEWEST = "(SELECT max(v.number) FROM policy_version v WHERE v.run_id = e.run_id) AS newest"
_LAG = f"""version, {_NEWEST}, (
    SELECT CAST(r.config #>> '{{train,max_staleness}}' AS int) FROM run r WHERE r.id = e.run_id
) AS max_staleness"""


def register(conn: Connection, url: str, *, run_id: int) -> None:
    """Make an engine known and give it to a run."""
    conn.execute(
        text(
            """
            INSERT INTO engine (url, run_id) VALUES (:url, :run_id)
            ON CONFLICT (url) DO UPDATE
               SET run_id = excluded.run_id, state = 'SERVING', version = NULL, loading = NULL, failures = 0,
                   retry_at = NULL, wire = NULL, healthy_at = NULL, error = NULL
            """
        ),
        {"url": url, "run_id": run_id},
    )


def status(conn: Connection) -> list[EngineStatus]:
    """All engines, those of the newest run first."""
    rows = conn.execute(
        text(
            f"""
            SELECT e.url, r.name AS run, e.state, e.version, {_NEWEST}, e.wire, e.error,
                   e.num_loads, e.num_refusals, e.num_failures,
                   extract(epoch FROM now() - e.healthy_at)::float AS healthy_s
              FROM engine e LEFT JOIN run r ON r.id = e.run_id ORDER BY e.run_id DESC NULLS LAST, e.id
            """
        )
    )
    return [EngineStatus(**{**row._mapping, "state": EngineState(row.state)}) for row in rows]


def drain(conn: Connection, url: str) -> bool:
    """Give the engine no new work until it is registered again; False = there is none at this URL."""
    done = conn.execute(text("UPDATE engine SET state = 'DRAINING' WHERE url = :url"), {"url": url})
    return bool(done.rowcount)


def remove(conn: Connection, url: str) -> bool:
    """Forget an engine; False = there is none at this URL."""
    return bool(conn.execute(text("DELETE FROM engine WHERE url = :url"), {"url": url}).rowcount)


def known(conn: Connection, url: str) -> bool:
    """Whether there is an engine at this URL, whatever its run and state."""
    return bool(conn.execute(text("SELECT count(*) FROM engine WHERE url = :url"), {"url": url}).scalar_one())


def urls(conn: Connection) -> list[str]:
    """Of all engines, whatever their run and state."""
    return list(conn.execute(text("SELECT url FROM engine ORDER BY id")).scalars())


def holder(conn: Connection, url: str) -> str | None:
    """Name of the run that the engine is given to; None = no run that is not over."""
    found = text(
        "SELECT r.name FROM engine e JOIN run r ON r.id = e.run_id"
        " WHERE e.url = :url AND r.state IN ('ACTIVE', 'PAUSED')"
    )
    name: str | None = conn.execute(found, {"url": url}).scalar_one_or_none()
    return name


def forget_others(conn: Connection, urls: list[str]) -> None:
    """Remove engines at other addresses: the one-machine stack knows all of its own."""
    conn.execute(text("DELETE FROM engine WHERE url <> ALL(CAST(:urls AS text[]))"), {"urls": urls})


def own(conn: Connection, owner: str, *, lease_s: float) -> list[EngineRow]:
    """Take or renew the ownership of every engine that nobody else owns; returns all that `owner` now owns.

    Only the owner loads weights into an engine, so two keepers never pause and resume across each other.
    """
    rows = conn.execute(
        text(
            f"""
            UPDATE engine SET owner = :owner, owner_until = now() + :lease_s * interval '1 second'
             WHERE run_id IS NOT NULL AND (retry_at IS NULL OR retry_at <= now())
               AND (owner = :owner OR owner IS NULL OR owner_until < now())
            RETURNING {_COLUMNS}
            """
        ),
        {"owner": owner, "lease_s": lease_s},
    )
    return [_row(row) for row in rows]


def loaded(
    conn: Connection,
    engine_id: int,
    *,
    owner: str,
    version: int | None,
    num_loads: int = 0,
    wire: str | None = None,
) -> None:
    """The engine answered on this wire (None = as before) and serves this version (None = none of its run's).

    `num_loads`: just loaded.
    """
    conn.execute(
        text(
            """
            UPDATE engine SET version = :version, loading = NULL, wire = coalesce(:wire, wire), healthy_at = now(),
                   failures = 0, retry_at = NULL, error = NULL, num_loads = num_loads + :num_loads,
                   state = CASE WHEN state = 'QUARANTINED' THEN 'SERVING' ELSE state END
             WHERE id = :id AND owner = :owner
            """
        ),
        {"id": engine_id, "owner": owner, "version": version, "num_loads": num_loads, "wire": wire},
    )


def starts_loading(conn: Connection, engine_id: int, *, owner: str, version: int) -> int | None:
    """Its keeper is about to fetch and load this version, which nobody prunes until the engine has it or refused it.

    Returns the claim under which to change the engine; None = it has another owner by now.
    """
    return _claim(conn, engine_id, owner, "loading = :version", version=version)


def claim(conn: Connection, engine_id: int, *, owner: str) -> int | None:
    """The claim under which `owner` may resume the engine now; None = it has another owner by now."""
    return _claim(conn, engine_id, owner, "loading = loading")


def _claim(conn: Connection, engine_id: int, owner: str, change: str, **values: int) -> int | None:
    """A claim above all earlier ones.

    It follows the clock, since an engine remembers what it saw: its row may be new, and so may be the database.
    """
    found: int | None = conn.execute(
        text(
            f"""
            UPDATE engine
               SET {change}, claim = greatest(claim + 1, CAST(extract(epoch FROM clock_timestamp()) * 1e6 AS bigint))
             WHERE id = :id AND owner = :owner AND owner_until > now()
            RETURNING claim
            """
        ),
        {"id": engine_id, "owner": owner, **values},
    ).scalar_one_or_none()
    return found


def take(conn: Connection, engine_id: int, *, owner: str, lease_s: float) -> bool:
    """Take or renew an engine for the trainer, also from a keeper; False = that one is about to load it."""
    done = conn.execute(
        text(
            """
            UPDATE engine SET owner = :owner, owner_until = now() + :lease_s * interval '1 second'
             WHERE id = :id AND (loading IS NULL OR owner = :owner OR owner IS NULL OR owner_until < now())
            """
        ),
        {"id": engine_id, "owner": owner, "lease_s": lease_s},
    )
    return bool(done.rowcount)


def give_back(conn: Connection, engine_id: int, *, owner: str) -> None:
    """Leave the engine to the next keeper that polls."""
    conn.execute(
        text("UPDATE engine SET owner = NULL, owner_until = NULL WHERE id = :id AND owner = :owner"),
        {"id": engine_id, "owner": owner},
    )


def lacks_weights(conn: Connection, engine_id: int, *, owner: str, error: str, refused: bool) -> Lag | None:
    """The version that it should serve can't be had. It is not to blame: no failure is counted; tried again later.

    `refused`: the version is there and damaged. Returns how far it is behind, if that is too far for new work.
    """
    row = conn.execute(
        text(
            f"""
            UPDATE engine e SET error = :error, loading = NULL, retry_at = now() + :wait_s * interval '1 second',
                   num_refusals = num_refusals + CAST(:refused AS int)
             WHERE id = :id AND owner = :owner
            RETURNING {_LAG}
            """
        ),
        {"id": engine_id, "owner": owner, "error": error, "wait_s": WEIGHTS_RETRY_S, "refused": refused},
    ).first()
    return _lag(row)


def serves(conn: Connection, engine_id: int, *, owner: str, version: int | None) -> None:
    """What the engine serves until it is loaded anew; its failures still count.

    None (weights of no version, or unreachable) keeps new work away and lets the live version move on without it.
    """
    conn.execute(
        text("UPDATE engine SET version = :version WHERE id = :id AND owner = :owner"),
        {"id": engine_id, "owner": owner, "version": version},
    )


def failed(
    conn: Connection, engine_id: int, *, owner: str, error: str, quarantine_after: int, refused: bool = False
) -> Lag | None:
    """A probe or a load failed: try again with back-off, and give it no new work after some failures in a row.

    `refused`: the weights were at fault. Returns how far it is behind, if that is too far for new work.
    """
    row = conn.execute(
        text(
            f"""
            UPDATE engine e SET failures = failures + 1, error = :error, loading = NULL,
                   num_refusals = num_refusals + CAST(:refused AS int),
                   num_failures = num_failures + CASE WHEN failures = 0 AND healthy_at IS NOT NULL
                                                      THEN 1 - CAST(:refused AS int) ELSE 0 END,
                   retry_at = now() + least(power(2, least(failures, 5)) * 0.25, 2) * interval '1 second',
                   state = CASE WHEN failures + 1 >= :quarantine_after AND state = 'SERVING'
                                THEN 'QUARANTINED' ELSE state END
             WHERE id = :id AND owner = :owner
            RETURNING {_LAG}
            """
        ),
        {
            "id": engine_id,
            "owner": owner,
            "error": error,
            "quarantine_after": quarantine_after,
            "refused": refused,
        },
    ).first()
    return _lag(row)


def serving(conn: Connection, run_id: int) -> list[EngineRow]:
    """Engines that may take new work of the run."""
    rows = conn.execute(
        text(
            f"SELECT {_COLUMNS}, {_NEWEST} FROM engine e"
            " WHERE run_id = :run_id AND state = 'SERVING' AND version IS NOT NULL ORDER BY id"
        ),
        {"run_id": run_id},
    )
    return [_row(row) for row in rows]


def live_version(conn: Connection, run_id: int) -> int | None:
    """The oldest version that a serving engine of the run may still sample from; None = no engine serves it."""
    oldest: int | None = conn.execute(
        text("SELECT min(version) FROM engine WHERE run_id = :run_id AND state = 'SERVING'"), {"run_id": run_id}
    ).scalar_one()
    return oldest


def trouble(conn: Connection, run_id: int) -> str | None:
    """Why no engine serves the run, in words; None = one does, or the first are still starting."""
    rows = conn.execute(
        text("SELECT url, state, version, error FROM engine WHERE run_id = :run_id ORDER BY id"), {"run_id": run_id}
    ).all()
    if any(row.state == EngineState.SERVING and row.version is not None for row in rows):
        return None
    whys = [f"{row.url} {row.state.lower()}" + (f": {row.error}" if row.error else "") for row in rows]
    if rows and not any(row.error or row.state != EngineState.SERVING for row in rows):
        return None
    return "no engine serves this run: " + ("; ".join(whys) or "it has none")


def _row(row: Row[Any]) -> EngineRow:
    return EngineRow(**{**row._mapping, "state": EngineState(row.state)})


def _lag(row: Row[Any] | None) -> Lag | None:
    if row is None or row.version is None or row.newest is None or row.newest - row.version <= row.max_staleness:
        return None
    return Lag(version=row.version, newest=row.newest, max_staleness=row.max_staleness)
