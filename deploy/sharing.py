"""`rollmill run share`: how the runs share a fleet, and changing it while they go on."""

from __future__ import annotations

from pydantic import ValidationError
from rich.table import Table

from common.config import SharingConfig
from common.db import sharing
from common.db.session import Database
from common.episode import RunState
from common.errors import SetupError
from common.sharing import fair_shares

Given = dict[str, object]
"""Field of SharingConfig -> its new value; what is not named stays."""


def change_share(database: Database, name: str, given: Given) -> SharingConfig:
    """Set what is given; returns what holds now. Raises SetupError that names the value, and then changes nothing."""
    with database.begin() as conn:
        load = sharing.require(conn, name)
        try:
            changed = SharingConfig.model_validate({**load.sharing.model_dump(), **given})
        except ValidationError as error:
            first = error.errors()[0]
            raise SetupError(f"run {name}: {first['loc'][0]} = {first['input']}: {first['msg']}") from None
        sharing.change(conn, load, changed)
    return changed


def check_named(database: Database, name: str | None) -> None:
    """Raise SetupError for a run that is not there, or that is over."""
    if name is not None:
        with database.begin() as conn:
            sharing.require(conn, name)


def share_table(database: Database, *, capacity: int | None) -> Table:
    """The runs that are not over: weights, limits, what is in flight and the share of `capacity`; None = no bound."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("run", "state", "weight", "max episodes", "max sandboxes", "in flight", "share"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
    with database.begin() as conn:
        loads = sharing.loads(conn)
        demands = [sharing.demand(conn, load, fed=load.run.state is RunState.ACTIVE) for load in loads]
    shares = [None] * len(loads) if capacity is None else fair_shares(capacity, demands)
    for load, share in zip(loads, shares, strict=True):
        table.add_row(
            load.run.name,
            load.run.state.lower(),
            f"{load.sharing.weight:g}",
            limit(load.sharing.max_episodes_in_flight),
            limit(load.sharing.max_sandboxes),
            f"{load.episodes:,}",
            "-" if share is None else f"{share:,}",
        )
    return table


def share_line(name: str, now: SharingConfig) -> str:
    """What holds of a run, in words."""
    return (
        f"run {name} has weight {now.weight:g}, max episodes {limit(now.max_episodes_in_flight)}, "
        f"max sandboxes {limit(now.max_sandboxes)}"
    )


def limit(value: int | None) -> str:
    """A limit as people write it."""
    return "none" if value is None else f"{value:,}"


def parse_limit(option: str, value: str) -> int | None:
    """A limit as it was typed. Raises SetupError for what is neither a number nor "none"."""
    if value == "none":
        return None
    try:
        return int(value)
    except ValueError:
        raise SetupError(f"{option} {value}: give a number, or none for no limit") from None
