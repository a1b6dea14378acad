"""Which run a repeated command goes on with: runs of one stem are called `stem`, `stem-2`, `stem-3` …"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from common.config import RunConfig
from common.db.stored_config import read_config
from common.errors import UnreadableConfig


def name_to_go_on(conn: Connection, config: RunConfig) -> str:
    """The newest unfinished run of the stem `config.name` that has this very configuration, else the next free name.

    Fields that a run was stored without have their defaults, so that one of an earlier version goes on, too.
    """
    rows = conn.execute(
        text("SELECT name, config, state FROM run WHERE name ~ :pattern ORDER BY id DESC"),
        {"pattern": f"^{config.name}(-[0-9]+)?$"},
    ).all()
    for row in rows:
        if row.state in ("ACTIVE", "PAUSED") and _is_same(row.name, row.config, config):
            return str(row.name)
    numbers = [int(row.name.removeprefix(config.name).removeprefix("-") or 1) for row in rows]
    return f"{config.name}-{max(numbers) + 1}" if numbers else config.name


def _is_same(name: str, stored: dict[str, Any], config: RunConfig) -> bool:
    try:
        other = read_config(name, stored)
    except UnreadableConfig:
        return False
    return other.model_copy(update={"name": config.name, "sharing": config.sharing}) == config
