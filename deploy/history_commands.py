"""The commands that look at runs, finished or going on, and learn from, keep or delete their history."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.options import DataDir, settings_for

history_app = typer.Typer()


@history_app.command()
def status(data_dir: DataDir = None) -> None:
    """List the runs of the database and how they stand."""
    settings = settings_for(data_dir)
    from deploy.access import open_database
    from deploy.status import status_table
    from deploy.tables import table_console

    with open_database(settings) as database:
        table_console().print(status_table(database))


@history_app.command(epilog="[bold]rollmill report demo-calculator-seed0[/]")
def report(
    run: Annotated[str | None, typer.Argument(help="The run's name.", show_default="the newest run")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here, as JSON.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show the report of a run again: reward curve, figures, queries."""
    settings = settings_for(data_dir)
    from deploy.access import find_run, open_database
    from deploy.report import check_writable, read_report
    from deploy.summary import present

    if json_file is not None:
        check_writable(json_file)
    with open_database(settings) as database:
        found = read_report(database, find_run(database, run), session=None)
    present(found, console=Console(), data_dir=settings.data_dir, json_file=json_file)


@history_app.command(epilog='[bold]rollmill sql "SELECT * FROM reward_by_version"[/]')
def sql(
    statement: Annotated[str, typer.Argument(help="One SQL statement; it may only read.")],
    data_dir: DataDir = None,
) -> None:
    """Ask the database: a table on a terminal, tab-separated values in a pipe.

    Views: samples, turns, reward_by_version, evaluation, staleness, episode_timings, failures_by_kind,
    stage_throughput.
    """
    settings = settings_for(data_dir)
    from common.db.examples import ask
    from deploy.access import open_database
    from deploy.tables import answer_table, tab_separated

    with open_database(settings) as database, database.begin() as conn:
        answer = ask(conn, statement)
    console = Console()
    if console.is_terminal:
        console.print(answer_table(answer, max_rows=None))
    else:
        sys.stdout.write(tab_separated(answer))


@history_app.command(epilog="[bold]rollmill queries demo-calculator-seed0[/]")
def queries(
    run: Annotated[str | None, typer.Argument(help="The run's name.", show_default="the newest run")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write them to this file, as Markdown.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Ask a run everything that people usually ask, and show the SQL to ask further."""
    settings = settings_for(data_dir)
    from deploy.access import find_run, open_database
    from deploy.queries import ask_all, print_all, write_markdown

    with open_database(settings) as database:
        found = find_run(database, run)
        answers = ask_all(database, found)
    if markdown is not None:
        write_markdown(answers, found, markdown)
    else:
        print_all(answers, found, console=Console())


@history_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog='[bold]rollmill psql[/]   ·   [bold]rollmill psql -c "TABLE staleness"[/]',
)
def psql(context: typer.Context, data_dir: DataDir = None) -> None:
    """Open Postgres's own shell on the database; further arguments are psql's."""
    settings = settings_for(data_dir)
    from deploy.access import database_url, run_psql

    with database_url(settings) as url:
        code = run_psql(url, context.args)
    raise typer.Exit(code)


@history_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="[bold]rollmill sft --run my-run --min-reward 1 --model DIR --out NEW[/]",
)
def sft(
    context: typer.Context,
    run: Annotated[str, typer.Option(help="The run whose rewarded training episodes are the rows.")],
    data_dir: DataDir = None,
) -> None:
    """Train a model folder on a run's rewarded episodes: `python -m trainer sft` with the data folder's database.

    Further options are its own: `python -m trainer sft --help`.
    """
    settings = settings_for(data_dir)
    from deploy.access import database_url, run_sft

    with database_url(settings) as url:
        code = run_sft(url, ["--run", run, *context.args])
    raise typer.Exit(code)


@history_app.command(epilog="[bold]rollmill export my-run --out my-run.parquet.d[/]")
def export(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    out: Annotated[Path, typer.Option(help="Folder to make; it appears when it is complete.")],
    data_dir: DataDir = None,
) -> None:
    """Write a run, finished or going on, as Parquet: episodes, turns with their token arrays, events, steps."""
    settings = settings_for(data_dir)
    from deploy.access import find_run, open_database
    from deploy.retention import export_with_bar

    with open_database(settings) as database:
        export_with_bar(database, find_run(database, run), out.absolute(), console=Console())


@history_app.command(epilog="[bold]rollmill prune my-run[/]   ·   [bold]rollmill prune my-run --all --yes[/]")
def prune(
    run: Annotated[str, typer.Argument(help="The name of a run that is finished or stopped.")],
    whole: Annotated[bool, typer.Option("--all", help="Delete every row of it, not only arrays and texts.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Delete a run's token arrays and texts from the database; rewards, timings, history and figures stay.

    Export it first if you may want them again.
    """
    settings = settings_for(data_dir)
    from common.db.prune import check_prunable
    from deploy.access import find_run, open_database
    from deploy.retention import prune_with_bar

    with open_database(settings) as database:
        found = find_run(database, run)
        check_prunable(database, found, whole=whole)
        if not yes:
            what = f"everything of run {run}" if whole else f"all token arrays and texts of run {run}"
            typer.confirm(f"Delete {what} for good?", abort=True)
        prune_with_bar(database, found, whole=whole, console=Console())
