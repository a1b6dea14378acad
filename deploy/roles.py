"""`rollmill db roles`: the passwords' file, and the roles made from it. It goes to whoever starts the processes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from common.db.roles import Access, Role, grant_roles, user_of
from common.db.session import Database
from common.errors import SetupError
from deploy.folder import write_private


def make_roles(database: Database, *, prefix: str, passwords_file: Path) -> list[Access]:
    """Create or update the roles. Their passwords are those of the file; one that is missing is made and added.

    The file is written first: a role never has a password that nobody knows.
    """
    users = {role: user_of(role, prefix=prefix) for role in Role}
    known = keep_passwords(list(users.values()), passwords_file)
    with database.begin() as conn:
        return grant_roles(conn, prefix=prefix, passwords={role: known[user] for role, user in users.items()})


def keep_passwords(users: Sequence[str], file: Path) -> dict[str, str]:
    """The passwords of the file; those of these users that are missing are made up and added to it."""
    known = read_passwords(file)
    missing = {user: secrets.token_hex(16) for user in users if user not in known}
    if missing:
        known |= missing
        _write(file, known)
    return known


def read_passwords(file: Path) -> dict[str, str]:
    """Password by role; empty where there is no file. Raises SetupError if others may read it or it is malformed."""
    if not file.exists():
        return {}
    if file.stat().st_mode & 0o077:
        raise SetupError(f"passwords file {file} may be read by others: `chmod 600 {file}`")
    known = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        parts = line.split()
        if len(parts) != 2:
            raise SetupError(f"passwords file {file} line {number} is not of the form `role password`")
        known[parts[0]] = parts[1]
    return known


def _write(file: Path, passwords: dict[str, str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, "".join(f"{user} {password}\n" for user, password in passwords.items()))
    except OSError as error:
        raise SetupError(
            f"cannot write passwords file {file} ({error.strerror}): name another with --passwords"
        ) from None


def roles_table(made: Sequence[Access]) -> Table:
    """What was done."""
    table = Table(box=None, header_style="dim")
    for column in ("role", "", "for"):
        table.add_column(column)
    for access in made:
        table.add_row(access.user, "created" if access.created else "updated", _PROCESS[access.role])
    return table


_PROCESS = {
    Role.INIT: "python -m workers.fleet init",
    Role.RUN: "python -m workers.fleet run",
    Role.EVAL: "python -m workers.fleet eval",
    Role.TRAINER: "python -m trainer",
    Role.FEEDER: "python -m workers.feeder",
    Role.REAPER: "python -m workers.reaper",
    Role.READER: "people: rollmill sql, psql, status, report, export",
}
