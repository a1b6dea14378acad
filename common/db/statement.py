"""The statements that every episode runs several times: planned once per connection, not at each execution.

Planning them takes the server longer than carrying them out. psycopg2 has no prepared statements of its own, so they
are PREPARE and EXECUTE of SQL: a connection pooler in between has to keep sessions apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


class Prepared:
    """A statement with `:name` for each parameter."""

    def __init__(self, sql: str, types: Mapping[str, str]) -> None:
        """`types` are the parameters' Postgres types; those that the statement does not have are left out."""
        names = list(dict.fromkeys(_PARAMETER.findall(sql)))
        body = _PARAMETER.sub(lambda match: f"${names.index(match[1]) + 1}", sql)
        self.name = f"rollmill_{hashlib.sha256(sql.encode()).hexdigest()[:16]}"
        self._prepare = f"PREPARE {self.name} ({', '.join(types[name] for name in names)}) AS {body}"
        self._execute = f"EXECUTE {self.name} ({', '.join(f'%({name})s' for name in names)})"

    def first(self, conn: Connection, parameters: Mapping[str, object]) -> Row[Any] | None:
        """Carry it out; the first row, None = none. More parameters than it has are no error."""
        # The set lives as long as the server's session: the pool gives a new connection a new one.
        known: set[str] = conn.info.setdefault("prepared", set())
        if self.name not in known:
            conn.exec_driver_sql(self._prepare)
            known.add(self.name)
        return conn.exec_driver_sql(self._execute, dict(parameters)).first()
