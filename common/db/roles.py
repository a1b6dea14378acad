"""Postgres roles: one for each kind of process, with the grants that its own functions need and no more.

What separates them are columns. Only EVAL may write a reward, and the check `reward_iff_scored` then keeps everybody
else from the state SCORED too. Turns are inserted by RUN and changed by nobody. Tables belong to whoever migrates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from psycopg2.extensions import encrypt_password
from sqlalchemy import Connection, text

from common.errors import SetupError

ROLES_LOCK = 7_261_005
PREFIX_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,40}")


class Role(StrEnum):
    """Who connects. The role in the server is called `<prefix>_<value>`."""

    INIT = "init"
    """INIT fleet: prepares episodes, notes sandboxes."""
    RUN = "run"
    """RUN fleet: stores turns, loads weights into engines."""
    EVAL = "eval"
    """EVAL fleet: the only one that writes rewards."""
    TRAINER = "trainer"
    """Opens its run, takes groups, marks steps, publishes versions, pauses a run that stands still."""
    FEEDER = "feeder"
    """Makes groups and episodes, moves the data cursor."""
    REAPER = "reaper"
    """Takes back and announces episodes. Not the feeder's: it makes no episodes, the feeder moves none."""
    READER = "reader"
    """People and their tools: reads everything, writes nothing."""


Grants = Mapping[str, tuple[str, ...]]
"""Table -> privileges; UPDATE and INSERT name the columns that the process writes."""

_HAND_BACK = "UPDATE (state, attempt, failures, claim_worker, claim_token, lease_until, enqueued_at, outcome, detail,"
_HAND_BACK += " node, not_before, version_min, version_max, num_turns, num_sampled, finished_at)"
"""What claiming, moving, retrying and handing back write; all of it is named in one statement, used or not."""
_NOTE = "INSERT (episode_id, attempt, from_state, to_state, worker, why)"
_NOTE_SANDBOX = "INSERT (episode_id, attempt, backend, node, handle)"
_STAGE: Grants = {
    "run": ("SELECT",),
    "task": ("SELECT",),
    "engine": ("SELECT",),
    "episode_group": ("SELECT", "UPDATE (num_final, state, completed_at)"),
    "episode": ("SELECT", _HAND_BACK),
    "episode_event": (_NOTE,),
}


def _with(grants: Grants, more: Grants) -> Grants:
    return {table: (*grants.get(table, ()), *more.get(table, ())) for table in {**grants, **more}}


GRANTS: Mapping[Role, Grants] = MappingProxyType(
    {
        Role.INIT: _with(
            _STAGE,
            {
                "episode": ("UPDATE (prepared)",),
                "node": ("SELECT",),
                "sandbox": ("SELECT", _NOTE_SANDBOX),
            },
        ),
        Role.RUN: _with(
            _STAGE,
            {
                "turn": ("SELECT", "INSERT"),
                "turn_tokens": ("SELECT", "INSERT"),
                "episode_files": (
                    "SELECT",
                    "INSERT (episode_id, attempt, num_files, left_out, content)",
                    "UPDATE (num_files, left_out, content)",
                ),
                "policy_version": ("SELECT",),
                "evaluation_point": ("SELECT",),
                "sandbox": ("SELECT", _NOTE_SANDBOX),
                "node": ("SELECT", "INSERT (name, seen_at)", "UPDATE (seen_at)"),
                "engine": (
                    "UPDATE (owner, owner_until, version, loading, healthy_at, failures, retry_at, error, state,"
                    " num_loads, num_refusals, num_failures, claim, wire)",
                ),
            },
        ),
        Role.EVAL: _with(
            _STAGE,
            {
                "turn": ("SELECT",),
                "episode_files": ("SELECT",),
                "episode": ("UPDATE (reward, reward_parts)",),
            },
        ),
        Role.TRAINER: {
            "run": (
                "SELECT",
                "INSERT (name, config)",
                "UPDATE (state, pause_reason, finished_at, sharing, weight, max_episodes_in_flight, max_sandboxes)",
            ),
            "episode_group": ("SELECT", "UPDATE (state, step_id, drop_reason, dropped_version)"),
            "engine": ("SELECT", "UPDATE (owner, owner_until)"),
            "episode": ("SELECT",),
            "turn": ("SELECT",),
            "turn_tokens": ("SELECT",),
            "train_step": (
                "SELECT",
                "INSERT (run_id, version_in)",
                "UPDATE (state, metrics, num_groups, error, failures, replays, finished_at)",
            ),
            "trained_episode": ("INSERT",),
            "policy_version": (
                "SELECT",
                "INSERT (run_id, number, path, manifest_sha256)",
                "UPDATE (path, manifest_sha256)",
            ),
            "evaluation_point": ("SELECT", "INSERT (run_id, version)"),
        },
        Role.FEEDER: {
            "run": ("SELECT", "UPDATE (epoch, cursor, dataset, error)"),
            "engine": ("SELECT",),
            "train_step": ("SELECT",),
            "task": ("SELECT", "INSERT (dataset, key, handler, payload)"),
            "submission": ("SELECT", "UPDATE (fed_at)"),
            "episode_group": ("SELECT", "INSERT (run_id, task_id, size, wanted, eval_version)", "UPDATE (state)"),
            "evaluation_point": ("SELECT", "UPDATE (error, finished_at)"),
            "episode": ("SELECT", "INSERT (run_id, group_id, index, eval_version)"),
            "episode_event": (_NOTE,),
            "sandbox": ("SELECT",),
            "node": ("SELECT",),
        },
        Role.REAPER: {
            "run": ("SELECT",),
            "policy_version": ("SELECT",),
            "engine": ("SELECT",),
            "episode_group": ("SELECT", "UPDATE (num_final, state, completed_at)"),
            "episode": ("SELECT", _HAND_BACK),
            "episode_event": (_NOTE,),
            "sandbox": ("SELECT", "UPDATE (destroyed_at)"),
            "node": ("SELECT",),
        },
        Role.READER: {},
    }
)
"""Beside these, everybody may read the schema's revision, and the reader every table and view."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """A role with which a process can connect."""

    role: Role
    user: str
    """The role's name in the server."""
    created: bool
    """False = it was there, and has got its grants and password anew."""


def user_of(role: Role, *, prefix: str) -> str:
    """The role's name in the server. Raises SetupError for a prefix that is no plain lower-case name."""
    if not PREFIX_PATTERN.fullmatch(prefix):
        raise SetupError(f"prefix {prefix!r} of the roles must be lower-case letters, digits and _: rollmill, say")
    return f"{prefix}_{role}"


def grant_roles(conn: Connection, *, prefix: str, passwords: Mapping[Role, str]) -> list[Access]:
    """Create the roles that are missing, and give each its password and exactly its grants: again and again.

    In one transaction, so that running processes never see a grant missing. Roles are the whole server's: another
    database of it takes another prefix. Raises SetupError when the connected user may not do this.
    """
    conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ROLES_LOCK})
    _check_allowed(conn)
    known = set(conn.execute(text("SELECT rolname FROM pg_roles")).scalars())
    database = _quoted(conn, conn.execute(text("SELECT current_database()")).scalar_one())
    # Postgres lets everybody make temporary tables, and before version 15 lasting ones too.
    _run(conn, f"REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC")
    _run(conn, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    made = []
    for role in Role:
        user = user_of(role, prefix=prefix)
        _set_role(conn, user, passwords[role], exists=user in known)
        _grant(conn, role, user, database)
        made.append(Access(role=role, user=user, created=user not in known))
    return made


def _check_allowed(conn: Connection) -> None:
    row = conn.execute(
        text(
            """
            SELECT r.rolname AS name, r.rolcreaterole OR r.rolsuper AS creates,
                   NOT EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = CAST('public' AS regnamespace)
                                AND c.relkind IN ('r', 'v') AND NOT pg_has_role(c.relowner, 'USAGE')) AS owns
              FROM pg_roles r WHERE r.rolname = current_user
            """
        )
    ).one()
    if not (row.creates and row.owns):
        lacks = "is not the owner of the tables" if row.creates else "may not create roles"
        raise SetupError(
            f"database user {row.name} {lacks}: set ROLLMILL_DATABASE_URL to the user that ran `rollmill migrate`, "
            "with the right to create roles (ALTER ROLE ... CREATEROLE)"
        )


def _set_role(conn: Connection, user: str, password: str, *, exists: bool) -> None:
    # The server is sent what it stores, so that no log of statements shows the password.
    verifier = encrypt_password(password, user, scope=conn.connection.dbapi_connection, algorithm="scram-sha-256")
    _run(
        conn,
        f"{'ALTER' if exists else 'CREATE'} ROLE {user} LOGIN NOCREATEDB NOCREATEROLE INHERIT PASSWORD '{verifier}'",
    )


def _grant(conn: Connection, role: Role, user: str, database: str) -> None:
    _run(conn, f"GRANT CONNECT ON DATABASE {database} TO {user}")
    _run(conn, f"GRANT USAGE ON SCHEMA public TO {user}")
    _run(conn, f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {user}")
    if role is Role.READER:
        _run(conn, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}")
        # A second fence, against what needs no grant, such as large objects from Postgres 16 on.
        _run(conn, f"ALTER ROLE {user} SET default_transaction_read_only = on")
        return
    _run(conn, f"GRANT SELECT ON alembic_version TO {user}")
    for table, privileges in GRANTS[role].items():
        _run(conn, f"GRANT {', '.join(privileges)} ON {table} TO {user}")


def _quoted(conn: Connection, name: str) -> str:
    return conn.dialect.identifier_preparer.quote(name)


def _run(conn: Connection, statement: str) -> None:
    conn.execution_options(no_parameters=True).exec_driver_sql(statement)
