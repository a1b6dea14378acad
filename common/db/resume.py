"""Which run a repeated command goes on with: runs of one stem are called `stem`, `stem-2`, `stem-3` …"""

from __future__ import annotations

import json

from sqlalchemy import Connection, text

from common.config import RunConfig


def name_to_go_on(conn: Connection, config: RunConfig) -> str:
    """The newest unfinished run of the stem `config.name` that has this very configuration, else the next free name."""
    wanted = json.loads(config.model_dump_json(exclude={"name", "sharing"}))
    rows = conn.execute(
        text("SELECT name, config - 'name' AS config, state FROM run WHERE name ~ :pattern ORDER BY id DESC"),
        {"pattern": f"^{config.name}(-[0-9]+)?$"},
    ).all()
    for row in rows:
        if row.state in ("ACTIVE", "PAUSED") and row.config == wanted:
            return str(row.name)
    numbers = [int(row.name.removeprefix(config.name).removeprefix("-") or 1) for row in rows]
    return f"{config.name}-{max(numbers) + 1}" if numbers else config.name
