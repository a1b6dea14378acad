"""How the runs of a database stand, as a table."""

from __future__ import annotations

from rich.table import Table

from common.db.session import Database
from common.db.snapshot import groups_dropped, newest_runs, take_snapshot
from common.episode import EpisodeState
from deploy.progress import last_reward, num_final

MAX_RUNS = 20
LEFT = ("run", "state", "groups dropped")


def status_table(database: Database) -> Table:
    """The newest runs, newest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("run", "state", "version", "reward", "episodes", "failed", "cancelled", "groups dropped"):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "groups dropped")
    with database.begin() as conn:
        for run in newest_runs(conn, limit=MAX_RUNS):
            now = take_snapshot(conn, run.id)
            last = last_reward(now, run.config)
            version = "-" if now.version_newest is None else now.version_newest
            table.add_row(
                run.name,
                now.state.lower(),
                f"{version} of {run.config.train.num_versions}",
                f"{last.mean_reward:.2f}" if last else "-",
                f"{num_final(now):,} of {sum(now.episodes.values()):,}",
                f"{now.episodes[EpisodeState.FAILED]:,}",
                f"{now.episodes[EpisodeState.CANCELLED]:,}",
                "\n".join(f"{num:,} {reason}" for reason, num in groups_dropped(conn, run.id).items()) or "-",
            )
    return table
