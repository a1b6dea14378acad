"""The commands that steer work: `rollmill submit`, `rollmill cancel`, `rollmill run`. Each is one transaction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from common.dataset import content_key, key_of, read_lines
from common.episode import RunState
from common.errors import SetupError
from common.storable import MAX_COUNT
from deploy.options import DataDir, settings_for

if TYPE_CHECKING:
    from common.db.cancel import Cancelled

NOTHING_TO_CANCEL = 1
"""Exit code when all that was named had ended before."""
MAX_ID = 2**63 - 1

run_app = typer.Typer(no_args_is_help=True, help="List, pause, resume, stop and extend runs, and share the fleet out.")

Episodes = Annotated[
    list[int] | None, typer.Option("--episode", min=1, max=MAX_ID, help="Id of an episode; may be repeated.")
]
Groups = Annotated[
    list[int] | None, typer.Option("--group", min=1, max=MAX_ID, help="Id of a group, for all its episodes.")
]
RunName = Annotated[str, typer.Argument(help="The run's name.")]
Why = Annotated[str, typer.Option("--why", help="The reason, for the history.")]


@run_app.command(name="list")
def list_runs(data_dir: DataDir = None) -> None:
    """List the newest runs and how they stand, like `rollmill status`."""
    settings = settings_for(data_dir)
    from deploy.access import open_database
    from deploy.status import status_table
    from deploy.tables import table_console

    with open_database(settings) as database:
        table_console().print(status_table(database))


@run_app.command(epilog="[bold]rollmill run pause my-run[/]")
def pause(run: RunName, data_dir: DataDir = None) -> None:
    """Make no new episodes; those in flight finish and are trained."""
    settings = settings_for(data_dir)
    from common.db import run_control
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        run_control.pause(conn, run)
    _say(f"run {run} is paused: episodes in flight finish, and no new ones are made; `rollmill run resume {run}`")


@run_app.command(epilog="[bold]rollmill run resume my-run[/]")
def resume(run: RunName, data_dir: DataDir = None) -> None:
    """Let a paused run go on where it stood."""
    settings = settings_for(data_dir)
    from common.db import run_control
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        run_control.resume(conn, run)
    _say(f"run {run} is active again")


@run_app.command(epilog="[bold]rollmill run extend my-run --versions 400[/]")
def extend(
    run: RunName,
    versions: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="train.num_versions from now on: more than now.")],
    data_dir: DataDir = None,
) -> None:
    """Train a run further, also one that is finished, from where it stands. A stopped one stays so.

    The learning rate's schedule then ends at the new end. A trainer that runs must be started again.
    """
    settings = settings_for(data_dir)
    from common.db import run_control
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        before = run_control.extend(conn, run, num_versions=versions)
    _say(
        f"run {run} now ends with version {versions} in place of {before}: set train.num_versions = {versions} in its "
        "file, and start it, or start it again"
    )


@run_app.command(epilog='[bold]rollmill run stop my-run --why "the reward is broken"[/]')
def stop(run: RunName, why: Why = "the run was stopped", data_dir: DataDir = None) -> None:
    """End a run for good: its episodes are cancelled, its untrained groups dropped. What was sampled is kept."""
    settings = settings_for(data_dir)
    from common.db import run_control
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        stopped = run_control.stop(conn, run, why=why)
    ended = cancelled_line(stopped.episodes) if stopped.episodes.num_cancelled else "no episode was in flight"
    _say(f"run {run} is stopped: {ended}; {stopped.num_groups_dropped:,} groups dropped")


@run_app.command(
    epilog="[bold]rollmill run share[/]   ·   [bold]rollmill run share my-run --weight 2 --max-episodes none[/]"
)
def share(
    run: Annotated[str | None, typer.Argument(help="The run's name.", show_default="a table of all")] = None,
    weight: Annotated[float | None, typer.Option(help="Its part beside the others'; 0 = what they leave.")] = None,
    max_episodes: Annotated[str | None, typer.Option(help="Its episodes in flight: a number, or none.")] = None,
    max_sandboxes: Annotated[str | None, typer.Option(help="Its sandboxes in flight: a number, or none.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Set a run's weight and limits while it goes on; without options, show those of all runs that are not over.

    Shares are of ROLLMILL_MAX_EPISODES_IN_FLIGHT, which must be set here as it is for the feeder.
    """
    settings = settings_for(data_dir)
    from deploy.access import open_database
    from deploy.sharing import change_share, check_named, parse_limit, share_line, share_table
    from deploy.tables import table_console

    given: dict[str, object] = {} if weight is None else {"weight": weight}
    if max_episodes is not None:
        given["max_episodes_in_flight"] = parse_limit("--max-episodes", max_episodes)
    if max_sandboxes is not None:
        given["max_sandboxes"] = parse_limit("--max-sandboxes", max_sandboxes)
    if given and run is None:
        raise SetupError("say which run's share to change: rollmill run share NAME")
    with open_database(settings) as database:
        if run is not None and given:
            _say(share_line(run, change_share(database, run, given)))
        else:
            check_named(database, run)
            table_console().print(share_table(database, capacity=settings.max_episodes_in_flight))
            if settings.max_episodes_in_flight is None:
                _say("no shares: ROLLMILL_MAX_EPISODES_IN_FLIGHT is not set here; set it as it is for the feeder")


def submit(
    run: RunName,
    tasks: Annotated[Path, typer.Argument(help="JSON lines, one task a line; `id` names it, or its contents do.")],
    data_dir: DataDir = None,
) -> None:
    """Hand tasks to a run that goes on: they are played before the rest of its own task set, as there is room.

    Each becomes a group like any other, and is trained. The same task handed in twice is played once.
    """
    settings = settings_for(data_dir)
    given = [(key_of(payload, otherwise=content_key(payload)), payload) for _, payload in read_lines(tasks)]
    from common.db import submissions
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        done = submissions.submit(conn, run, given)
    known = f", {done.num_known:,} known from before" if done.num_known else ""
    paused = "; the run is paused" if done.run_state is RunState.PAUSED else ""
    _say(f"run {run}: {_tasks(done.num_new)} submitted{known}; {_tasks(done.num_waiting)} waiting for room{paused}")


def cancel(
    episode: Episodes = None,
    group: Groups = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of a run, for all its episodes.")] = None,
    why: Why = "cancelled by hand",
    data_dir: DataDir = None,
) -> None:
    """Cancel episodes at once, wherever they stand; turns that were sampled are kept, but never trained.

    An active run makes new episodes in their place: `rollmill run stop` ends it. Exit code 1: all had ended before.
    """
    if sum(bool(given) for given in (episode, group, run)) != 1:
        raise SetupError("say what to cancel by one of --episode ID, --group ID and --run NAME")
    settings = settings_for(data_dir)
    from common.db import cancel, runs
    from deploy.access import open_database

    with open_database(settings) as database, database.begin() as conn:
        if run:
            done = cancel.cancel_run(conn, runs.require(conn, run).id, why=why)
        elif group:
            done = cancel.cancel_groups(conn, group, why=why)
        else:
            done = cancel.cancel_episodes(conn, episode or [], why=why)
    _say(cancelled_line(done))
    if not done.num_cancelled:
        raise typer.Exit(NOTHING_TO_CANCEL)


def cancelled_line(done: Cancelled) -> str:
    """What a cancellation did, in words."""
    ended = ", ".join(f"{num:,} {state.lower()}" for state, num in sorted(done.already_final.items()))
    if not done.num_cancelled:
        return f"nothing to cancel: {'no episodes' if not ended else f'all had ended before ({ended})'}"
    line = f"{_episodes(done.num_cancelled)} cancelled"
    if done.num_at_work:
        line += f", work on {done.num_at_work:,} of them stops within seconds"
    return f"{line}; {sum(done.already_final.values()):,} had ended before ({ended})" if ended else line


def _tasks(num: int) -> str:
    return f"{num:,} task" if num == 1 else f"{num:,} tasks"


def _episodes(num: int) -> str:
    return f"{num:,} episode" if num == 1 else f"{num:,} episodes"


def _say(line: str) -> None:
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
