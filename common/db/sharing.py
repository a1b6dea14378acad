"""What runs have in flight and could use, for the feeder that shares a fleet out between them, and for people."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.config import SharingConfig
from common.db import engines, groups, runs
from common.db.runs import Run
from common.errors import SetupError
from common.sharing import Demand


@dataclass(frozen=True, kw_only=True)
class Load:
    """A run that is not over, with what it has in flight."""

    run: Run
    sharing: SharingConfig
    """What holds now."""
    episodes: int
    """Not final."""
    sandboxes: int | None
    """Sandboxes that are not known to be gone, and NEW episodes, each of which will make one; a dead attempt's is
    counted until the reaper has swept it away, or its node has been silent for a while. None = not counted, as the run
    has no limit of them."""


def loads(conn: Connection) -> list[Load]:
    """All runs that are ACTIVE or PAUSED, in the order of their ids."""
    rows = conn.execute(
        text(
            """
            SELECT r.id, r.name, r.config, r.sharing, r.state, r.weight, r.max_episodes_in_flight, r.max_sandboxes,
                   e.num AS episodes, CASE WHEN r.max_sandboxes IS NOT NULL THEN e.num_new + s.num END AS sandboxes
              FROM run r
              CROSS JOIN LATERAL (SELECT count(*) AS num, count(*) FILTER (WHERE state = 'NEW') AS num_new
                                    FROM episode WHERE run_id = r.id AND state IN ('NEW', 'READY', 'SAMPLED')) e
              CROSS JOIN LATERAL (SELECT count(*) AS num FROM sandbox s JOIN episode e ON e.id = s.episode_id
                                   WHERE r.max_sandboxes IS NOT NULL AND e.run_id = r.id AND s.destroyed_at IS NULL
                                     AND NOT (e.state = 'NEW' AND e.attempt = s.attempt)
                                     AND NOT ((e.attempt > s.attempt OR e.state NOT IN ('NEW', 'READY', 'SAMPLED'))
                                              AND EXISTS (
                                         SELECT FROM node n WHERE n.name = s.node
                                            AND n.seen_at < now() - interval '5 minutes'))) s
             WHERE r.state IN ('ACTIVE', 'PAUSED') ORDER BY r.id
            """
        )
    )
    return [
        Load(
            run=runs.from_row(row),
            sharing=SharingConfig(
                weight=row.weight, max_episodes_in_flight=row.max_episodes_in_flight, max_sandboxes=row.max_sandboxes
            ),
            episodes=row.episodes,
            sandboxes=row.sandboxes,
        )
        for row in rows
    ]


def demand(conn: Connection, load: Load, *, fed: bool) -> Demand:
    """What the run could use; one that is not fed, because it is paused or in trouble, makes no groups."""
    if not load.run.is_readable:
        # Nobody knows the size of its groups; what it has in flight counts for the others, and it makes none.
        return Demand(weight=load.sharing.weight, group_size=1, in_flight=load.episodes, room=0)
    return Demand(
        weight=load.sharing.weight,
        group_size=load.run.config.episodes_per_group,
        in_flight=load.episodes,
        room=_room(conn, load) if fed else 0,
    )


def _room(conn: Connection, load: Load) -> int:
    """Groups that the run may make under the staleness bound, up to its end, and under its own limits."""
    run, config = load.run, load.run.config
    live_version = engines.live_version(conn, run.id)
    if live_version is None:
        return 0
    bounds = [
        config.groups_in_flight - groups.num_in_flight(conn, run.id, live_version=live_version),
        config.num_groups - groups.num_not_dropped(conn, run.id),
    ]
    if load.sharing.max_episodes_in_flight is not None:
        bounds.append((load.sharing.max_episodes_in_flight - load.episodes) // config.episodes_per_group)
    if load.sharing.max_sandboxes is not None and load.sandboxes is not None:
        bounds.append((load.sharing.max_sandboxes - load.sandboxes) // config.episodes_per_group)
    return max(0, min(bounds))


def require(conn: Connection, name: str) -> Load:
    """The run of this name, with what it has in flight. Raises SetupError if there is none, or it is over."""
    run = runs.require(conn, name)
    for load in loads(conn):
        if load.run.id == run.id:
            return load
    raise SetupError(f"run {name} is {run.state.lower()}: it has no share any more")


def change(conn: Connection, load: Load, sharing: SharingConfig) -> None:
    """Set weight and limits of the run. Raises SetupError for a limit that is less than one of its groups."""
    try:
        sharing.check(episodes_per_group=load.run.config.episodes_per_group)
    except ValueError as error:
        raise SetupError(f"run {load.run.name}: {error}") from None
    runs.set_sharing(conn, load.run.id, sharing)
