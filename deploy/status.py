"""How the runs of a database stand, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.db import nodes
from common.db.nodes import NodeState
from common.db.runs import Run
from common.db.session import Database
from common.db.snapshot import Snapshot, groups_dropped, newest_runs, take_snapshot
from common.episode import EpisodeState, RunState
from deploy.progress import evaluated, last_evaluation, last_reward, num_final

MAX_RUNS = 20
NODES_WITHIN_S = 86_400.0
"""A node that was silent for longer is shown only if episodes wait for it."""
LEFT = ("run", "state", "groups dropped")


def status_table(database: Database) -> RenderableType:
    """The newest runs, newest first; below them why those that go on do not come further."""
    troubles = []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("run", "state", "version", "reward", "held out", "episodes", "failed", "cancelled", "groups dropped"):
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "groups dropped")
    with database.begin() as conn:
        for run in newest_runs(conn, limit=MAX_RUNS):
            now = take_snapshot(conn, run.id)
            config = run.config if run.is_readable else None
            last, held_out = last_reward(now, config) if config else None, last_evaluation(now.evaluations)
            version = "-" if now.version_newest is None else now.version_newest
            table.add_row(
                run.name,
                now.state.lower(),
                f"{version} of {config.train.num_versions if config else '?'}",
                f"{last.mean_reward:.2f}" if last else "-",
                f"{evaluated(held_out)} at {held_out.version}" if held_out else "-",
                f"{num_final(now):,} of {sum(now.episodes.values()):,}",
                f"{now.episodes[EpisodeState.FAILED]:,}",
                f"{now.episodes[EpisodeState.CANCELLED]:,}",
                "\n".join(f"{num:,} {reason}" for reason, num in groups_dropped(conn, run.id).items()) or "-",
            )
            troubles += [Text(f"{run.name}: {line}", style="red") for line in _troubles(run, now)]
        shown = nodes.states(conn, within_s=NODES_WITHIN_S)
    return Group(table, *troubles, *([nodes_table(shown)] if len(shown) > 1 else []))


def nodes_table(shown: Sequence[NodeState]) -> Table:
    """The nodes, and what waits for each."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("node", "waiting for RUN", "RUN seen"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for node in shown:
        seen = "never" if node.silent_s is None else f"{node.silent_s:.0f} s ago"
        table.add_row(node.name, f"{node.num_waiting:,}", seen)
    return table


def _troubles(run: Run, now: Snapshot) -> list[str]:
    if now.state in (RunState.FINISHED, RunState.STOPPED):
        return []
    error = now.error if run.is_readable else str(run.stored)
    fed = None if error is None else f"cannot be fed: {error}"
    paused = None if now.pause_reason is None else f"paused: {now.pause_reason}"
    step = None if now.step_trouble is None else str(now.step_trouble)
    return [trouble for trouble in (fed, paused, step, now.engine_trouble) if trouble is not None]
