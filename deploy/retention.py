"""`rollmill export` and `rollmill prune` at the terminal: what will happen, how far it is, what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from common.db import prune
from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError


def export_with_bar(database: Database, run: Run, folder: Path, *, console: Console) -> None:
    """Export the run and say what was written. Raises SetupError where pyarrow is missing."""
    try:
        from deploy.export import export_run
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise SetupError("an export needs pyarrow: `pip install pyarrow`") from None
    tasks: dict[str, TaskID] = {}
    with _progress(console) as progress:

        def report(table: str, done: int, total: int) -> None:
            if table not in tasks:
                tasks[table] = progress.add_task(table, total=total)
            progress.update(tasks[table], completed=done)

        num_rows = export_run(database, run, folder, report=report)
    size_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    counts = ", ".join(f"{num:,} {table}" for table, num in num_rows.items())
    console.print(f"{run.name}: {counts}; {size_mb:.1f} MB in {folder}", highlight=False, soft_wrap=True)


def prune_with_bar(database: Database, run: Run, *, whole: bool, console: Console) -> None:
    """Delete what the run's turns say, or all of it, and say so."""
    work = prune.delete_run(database, run) if whole else prune.empty_turns(database, run)
    with _progress(console) as progress:
        task = progress.add_task("episodes", total=prune.num_episodes(database, run))
        for num in work:
            progress.advance(task, num)
    done = "is gone from the database; its weights are files and stay" if whole else "has no token arrays and texts now"
    console.print(f"{run.name} {done}", highlight=False, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield progress
