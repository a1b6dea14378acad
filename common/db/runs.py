"""Runs: opening one from its configuration, its state, its data cursor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from common.config import RunConfig, SharingConfig
from common.db.stored_config import read_config
from common.episode import RUN_MOVES, RunState
from common.errors import SetupError, UnreadableConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as stored."""

    id: int
    name: str
    state: RunState
    stored: RunConfig | UnreadableConfig
    """What `config` gives or raises: what needs no configuration goes on without it."""

    @property
    def config(self) -> RunConfig:
        """Its section `sharing` is the one last configured: an operator may have set other values since.

        Raises UnreadableConfig where another release has stored what this one refuses.
        """
        if isinstance(self.stored, UnreadableConfig):
            raise self.stored
        return self.stored

    @property
    def is_readable(self) -> bool:
        """Whether there is a `config`."""
        return isinstance(self.stored, RunConfig)


def open_run(conn: Connection, config: RunConfig) -> Run:
    """The run of this name, made if it is new.

    A run that has no group yet takes the new configuration. Raises SetupError if one that has exists with another.
    Another section [sharing] than at the last time is always taken; the same one leaves what an operator has set since.
    Section [tracking] is taken as given, and stays stored as it was: it makes no other run.
    """
    document = config.model_dump_json(exclude={"sharing"})
    conn.execute(
        text("INSERT INTO run (name, config) VALUES (:name, CAST(:config AS jsonb)) ON CONFLICT (name) DO NOTHING"),
        {"name": config.name, "config": document},
    )
    run = find(conn, config.name)
    assert run is not None
    if run.config.sharing != config.sharing:
        run = _configure_sharing(conn, run, config.sharing)
    if run.config.model_copy(update={"tracking": config.tracking}) == config:
        return replace(run, stored=config)
    changed = conn.execute(
        text(
            """
            UPDATE run SET config = CAST(:config AS jsonb), dataset = NULL, error = NULL
             WHERE id = :id AND NOT EXISTS (SELECT FROM episode_group WHERE run_id = :id)
            """
        ),
        {"id": run.id, "config": document},
    )
    if changed.rowcount == 0:
        raise SetupError(_other_configuration(run.config, config))
    # The trainer publishes the start weights again: they may be another model's now.
    for table in ("evaluation_point", "policy_version"):
        conn.execute(text(f"DELETE FROM {table} WHERE run_id = :id"), {"id": run.id})
    return replace(run, stored=config)


def find_same(conn: Connection, config: RunConfig) -> Run | None:
    """The run of this name, if there is one; writes nothing. Raises SetupError where `open_run` would."""
    run = find(conn, config.name)
    if run is None or not differences(run.config, config):
        return run
    if conn.execute(text("SELECT EXISTS (SELECT FROM episode_group WHERE run_id = :id)"), {"id": run.id}).scalar_one():
        raise SetupError(_other_configuration(run.config, config))
    return run


def _configure_sharing(conn: Connection, run: Run, sharing: SharingConfig) -> Run:
    conn.execute(
        text("UPDATE run SET sharing = CAST(:sharing AS jsonb) WHERE id = :id"),
        {"id": run.id, "sharing": sharing.model_dump_json()},
    )
    set_sharing(conn, run.id, sharing)
    return replace(run, stored=run.config.model_copy(update={"sharing": sharing}))


def set_sharing(conn: Connection, run_id: int, sharing: SharingConfig) -> None:
    """Weight and limits of the run from now on; the feeder's next round follows them."""
    conn.execute(
        text(
            """
            UPDATE run SET weight = :weight, max_episodes_in_flight = :max_episodes_in_flight,
                   max_sandboxes = :max_sandboxes
             WHERE id = :id
            """
        ),
        {"id": run_id, **sharing.model_dump()},
    )


def _other_configuration(old: RunConfig, new: RunConfig) -> str:
    before, after = old.train.num_versions, new.train.num_versions
    extended = old.model_copy(update={"train": old.train.model_copy(update={"num_versions": after})})
    advice = "Take another name, or the old values"
    if after > before and differences(extended, new) == []:
        advice = f"`rollmill run extend {new.name} --versions {after}` trains it further"
    return f"run {new.name} exists with another configuration: {', '.join(differences(old, new))}. {advice}"


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Each field that makes another run, as `section.field old -> new`, in the order of the configuration."""
    left_out = {"sharing", "tracking"}
    return list(
        _differences("", old.model_dump(mode="json", exclude=left_out), new.model_dump(mode="json", exclude=left_out))
    )


def _differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**new, **old}:
            yield from _differences(f"{path}.{key}" if path else key, old.get(key), new.get(key))
    elif old != new:
        yield f"{path} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    """A value as in the file; of a section as a whole only the fields that say something."""
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_shown(part)}" for key, part in value.items() if part is not None) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def find(conn: Connection, name: str) -> Run | None:
    """The run of this name."""
    row = conn.execute(
        text("SELECT id, name, config, sharing, state FROM run WHERE name = :name"), {"name": name}
    ).first()
    return from_row(row) if row else None


def require(conn: Connection, name: str, *, lock: bool = False) -> Run:
    """The run of this name, its row locked if asked. Raises SetupError that lists the newest ones there are."""
    if lock:
        conn.execute(text("SELECT id FROM run WHERE name = :name FOR UPDATE"), {"name": name})
    run = find(conn, name)
    if run is None:
        newest = conn.execute(text("SELECT name FROM run ORDER BY id DESC LIMIT 10")).scalars().all()
        raise SetupError(f"no run {name} in the database; there are: {', '.join(newest) or 'none'}")
    return run


def active(conn: Connection) -> list[Run]:
    """Runs that the feeder feeds, those too whose configuration cannot be read."""
    rows = conn.execute(text("SELECT id, name, config, sharing, state FROM run WHERE state = 'ACTIVE' ORDER BY id"))
    return [from_row(row) for row in rows]


def finish(conn: Connection, run_id: int) -> None:
    """Mark a run whose last version is published, unless somebody has stopped it."""
    move(conn, run_id, RunState.FINISHED)


def check_end(conn: Connection, run: Run) -> None:
    """Raise SetupError if the run has been given more versions since it was read. Its row stays locked."""
    now = require(conn, run.name, lock=True).config.train.num_versions
    if now > run.config.train.num_versions:
        raise SetupError(
            f"run {run.name} was extended to {now} versions after its trainer was started for "
            f"{run.config.train.num_versions}: set train.num_versions to {now} in its file and start it again"
        )


def extend(conn: Connection, run_id: int, *, num_versions: int) -> None:
    """Let the run go on to this version; one that is FINISHED is ACTIVE again. With its row locked."""
    conn.execute(
        text(
            """
            UPDATE run SET config = jsonb_set(config, '{train,num_versions}', to_jsonb(CAST(:num_versions AS int))),
                   state = CASE state WHEN 'FINISHED' THEN 'ACTIVE' ELSE state END, finished_at = NULL
             WHERE id = :id
            """
        ),
        {"id": run_id, "num_versions": num_versions},
    )


def move(conn: Connection, run_id: int, to: RunState) -> bool:
    """Compare-and-set of the run's state; False = that is not a move from where it stands.

    The run's row stays locked until the transaction ends: no feeder makes groups and no trainer takes some meanwhile.
    """
    moved = conn.execute(
        text(
            """
            UPDATE run SET state = :to, finished_at = CASE WHEN :final THEN now() END
             WHERE id = :id AND state = ANY(:sources) RETURNING id
            """
        ),
        {
            "id": run_id,
            "to": to,
            "sources": [state for state, targets in RUN_MOVES.items() if to in targets],
            "final": not RUN_MOVES[to],
        },
    ).first()
    return moved is not None


def note_pause(conn: Connection, run_id: int, *, reason: str | None) -> None:
    """Say why the run is paused, in the transaction that pauses it; None = somebody did it by hand."""
    conn.execute(text("UPDATE run SET pause_reason = :reason WHERE id = :id"), {"id": run_id, "reason": reason})


def note_resume(conn: Connection, run_id: int) -> None:
    """Forget why the run was paused, in the transaction that resumes it: what failed before counts no more."""
    conn.execute(text("UPDATE run SET pause_reason = NULL, resumed_at = now() WHERE id = :id"), {"id": run_id})


def pause_reason_of(conn: Connection, run_id: int) -> str | None:
    """Why the trainer paused the run; None = it is not paused, or somebody did it by hand."""
    reason: str | None = conn.execute(
        text("SELECT CASE WHEN state = 'PAUSED' THEN pause_reason END FROM run WHERE id = :id"), {"id": run_id}
    ).scalar_one()
    return reason


def made_at(conn: Connection, run_id: int) -> datetime:
    """When the run was made: no two runs of one name share it, in whichever databases."""
    made: datetime = conn.execute(
        text("SELECT created_at AT TIME ZONE 'UTC' FROM run WHERE id = :id"), {"id": run_id}
    ).scalar_one()
    return made


def bind_dataset(conn: Connection, run_id: int, dataset: str) -> str:
    """The task set that the run reads from its first feeding on: this one, unless another was bound before."""
    bound: str = conn.execute(
        text("UPDATE run SET dataset = coalesce(dataset, :dataset) WHERE id = :id RETURNING dataset"),
        {"id": run_id, "dataset": dataset},
    ).scalar_one()
    return bound


def error_of(conn: Connection, run_id: int) -> str | None:
    """Why the run cannot be fed; None = it can, or the feeder has not looked."""
    error: str | None = conn.execute(text("SELECT error FROM run WHERE id = :id"), {"id": run_id}).scalar_one()
    return error


def note_error(conn: Connection, run_id: int, error: str | None) -> None:
    """Say why the run cannot be fed, or with None that it can."""
    conn.execute(
        text("UPDATE run SET error = :error WHERE id = :id AND error IS DISTINCT FROM :error"),
        {"id": run_id, "error": error},
    )


@dataclass(frozen=True, kw_only=True)
class DataCursor:
    """How far a run has read its task set."""

    epoch: int
    """Whole passes that are behind it."""
    index: int
    """Tasks of this pass that have a group."""


def lock_cursor(conn: Connection, run_id: int) -> DataCursor | None:
    """The cursor of an ACTIVE run, locked until the transaction ends: one feeder at a time. None = not active.

    Several are locked in the order of their ids. The lock lets others add rows that name the run.
    """
    row = conn.execute(
        text("SELECT epoch, cursor FROM run WHERE id = :id AND state = 'ACTIVE' FOR NO KEY UPDATE"), {"id": run_id}
    ).first()
    return DataCursor(epoch=row.epoch, index=row.cursor) if row else None


def move_cursor(conn: Connection, run_id: int, cursor: DataCursor) -> None:
    """Store the cursor, in the transaction that makes the groups."""
    conn.execute(
        text("UPDATE run SET epoch = :epoch, cursor = :index WHERE id = :id"),
        {"id": run_id, "epoch": cursor.epoch, "index": cursor.index},
    )


def from_row(row: Row[tuple[Any, ...]]) -> Run:
    """A run from its columns id, name, config, sharing and state, whether its configuration can be read or not."""
    return Run(id=row.id, name=row.name, state=RunState(row.state), stored=_stored(row))


def _stored(row: Row[tuple[Any, ...]]) -> RunConfig | UnreadableConfig:
    try:
        return read_config(row.name, {**row.config, "sharing": row.sharing})
    except UnreadableConfig as error:
        return error
