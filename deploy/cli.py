"""The command line: `rollmill`. Checks what the user gave, then hands over; heavy imports wait until needed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import load_run_config
from common.errors import RollmillError, SetupError
from deploy.broker import BrokerKind
from deploy.broker_commands import broker_app
from deploy.control import cancel, run_app, submit
from deploy.demo import DemoHandler, demo_config
from deploy.engine import EngineKind
from deploy.engine_commands import engine_app
from deploy.history_commands import history_app
from deploy.options import DataDir, settings_for
from deploy.run_checks import with_handler, with_model, with_tasks
from deploy.sandbox import sandbox_app

DEMO_STALL_LIMIT_S = 300.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Asynchronous reinforcement learning for multi-turn agents, as a pipeline of queues.",
    epilog="Start here: [bold]rollmill demo[/]. It needs no service, no GPU and no root.",
)

db_app = typer.Typer(no_args_is_help=True, help="The database's own matters: who may do what in it.")
app.add_typer(db_app, name="db")
app.add_typer(engine_app, name="engine")
app.add_typer(broker_app, name="broker")
app.add_typer(sandbox_app, name="sandbox")

Broker = Annotated[
    BrokerKind,
    typer.Option(envvar="BROKER", help="Which broker to start, where ROLLMILL_BROKER_URL names none."),
]
Engine = Annotated[
    EngineKind, typer.Option(envvar="ENGINE", help="What samples the episodes; vllm needs `make engine` once.")
]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write the final report here, as JSON.")]
KeepUp = Annotated[bool, typer.Option("--keep-up", help="When the run is finished, stay up until Ctrl-C.")]
SetupSeconds = Annotated[float | None, typer.Option("--setup-seconds", min=0, hidden=True)]


@app.command(
    epilog="[bold]rollmill demo[/]   ·   [bold]rollmill demo --seed 3 --report report.json[/]   ·   "
    "[bold]BROKER=rabbitmq rollmill demo --handler shell --keep-up[/]"
)
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of the tasks, their order, and the trainer.")] = 0,
    handler: Annotated[DemoHandler, typer.Option(help="The kind of task.")] = DemoHandler.CALCULATOR,
    versions: Annotated[int, typer.Option(min=1, help="Policy versions to train.")] = 40,
    max_staleness: Annotated[int, typer.Option(min=0, help="Versions that a trained episode may be behind.")] = 1,
    report: ReportFile = None,
    broker: Broker = BrokerKind.VALKEY,
    engine: Engine = EngineKind.SMALL,
    data_dir: DataDir = None,
    keep_up: KeepUp = False,
    setup_seconds: SetupSeconds = None,
) -> None:
    """Train a tiny agent on this machine and watch it learn: the whole loop, in minutes.

    Ctrl-C stops everything; the same command then goes on from where it stopped.
    """
    settings = settings_for(data_dir)
    config = demo_config(handler=handler, seed=seed, num_versions=versions, max_staleness=max_staleness)
    from deploy.local_run import Order, run_locally

    run_locally(
        Order(
            config=with_model(config),
            settings=settings,
            broker=broker,
            engine=engine,
            numbered=True,
            report_file=report,
            setup_s=setup_seconds,
            keep_up=keep_up,
            stall_limit_s=DEMO_STALL_LIMIT_S,
        ),
        console=Console(),
    )


@app.command(epilog="[bold]rollmill up --config run.toml[/]")
def up(
    config: Annotated[Path, typer.Option(help="The run's TOML file; its fields are in common/config.py.")],
    report: ReportFile = None,
    broker: Broker = BrokerKind.VALKEY,
    engine: Engine = EngineKind.SMALL,
    data_dir: DataDir = None,
    keep_up: KeepUp = False,
    trainer: Annotated[str, typer.Option(help="Module of another trainer: docs/own_trainer.md.")] = "trainer",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all of it, say what it will do, and end.")] = False,
) -> None:
    """Train your own run on this machine, with the same processes as the demo.

    Real servers are used where ROLLMILL_DATABASE_URL and ROLLMILL_BROKER_URL name them.
    """
    settings = settings_for(data_dir)
    run_config = with_tasks(with_handler(with_model(load_run_config(config))))
    if dry_run:
        from deploy.start_checks import print_plan

        print_plan(run_config, config_file=config, settings=settings, engine=engine, trainer=trainer)
        return
    from deploy.local_run import Order, run_locally

    run_locally(
        Order(
            config=run_config,
            settings=settings,
            broker=broker,
            engine=engine,
            numbered=False,
            report_file=report,
            setup_s=None,
            keep_up=keep_up,
            stall_limit_s=None,
            trainer=trainer,
        ),
        console=Console(),
    )


@app.command(
    "eval",
    epilog="[bold]rollmill eval --config run.toml --model models/my-start-weights --episodes 200[/]   ·   "
    "[bold]rollmill eval --config run.toml --model DATA/weights/my-run/000040 --dataset test.jsonl[/]",
)
def evaluate(
    config: Annotated[Path, typer.Option(help="A run's TOML file: handler, \\[rollout], \\[eval].")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model folder, or a version's weights, also an adapter of the run.", show_default="the run's model"
        ),
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="JSON lines, one task a line.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many, rounded up to whole tasks.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=1000, help="Episodes of each task.")] = None,
    report: ReportFile = None,
    broker: Broker = BrokerKind.VALKEY,
    engine: Engine = EngineKind.SMALL,
    data_dir: DataDir = None,
) -> None:
    """Play tasks with a model on this machine, without training: mean reward, standard error, pass@k.

    Exit code 1 if infrastructure failed under episodes, which have no reward then. Ctrl-C stops; the same command
    goes on.
    """
    settings = settings_for(data_dir)
    from deploy.evaluate import Asked, eval_config, evaluate_locally, whole_model
    from deploy.local_run import Order

    run_config = load_run_config(config)
    asked = whole_model(
        run_config,
        Asked(model=model, dataset=dataset, episodes=episodes, samples_per_task=samples),
        data_dir=settings.data_dir,
    )
    result = evaluate_locally(
        Order(
            config=with_tasks(with_handler(with_model(eval_config(run_config, asked)))),
            settings=settings,
            broker=broker,
            engine=engine,
            numbered=True,
            report_file=report,
            setup_s=None,
            keep_up=False,
            stall_limit_s=None,
        ),
        console=Console(),
        model=model,
    )
    if result.scored < result.episodes or result.error is not None:
        raise typer.Exit(1)


app.add_typer(history_app)
app.add_typer(run_app, name="run")
app.command(epilog="[bold]rollmill submit my-run more-tasks.jsonl[/]")(submit)
app.command(
    epilog="[bold]rollmill cancel --episode 17 --episode 18[/]   ·   [bold]rollmill cancel --group 5[/]   ·   "
    '[bold]rollmill cancel --run my-run --why "the tool was down"[/]'
)(cancel)


@app.command(epilog="[bold]rollmill demo --keep-up[/], and in another terminal [bold]rollmill flower[/]")
def flower(
    port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 5555,
    data_dir: DataDir = None,
) -> None:
    """Serve Flower, Celery's web page of workers, tasks and queues, until Ctrl-C. Needs a running stack."""
    settings = settings_for(data_dir)
    from deploy.access import serve_flower

    def announce(password_file: Path) -> None:
        Console().print(
            f"Flower is up: http://127.0.0.1:{port}  user admin, password in {password_file}; Ctrl-C ends it",
            highlight=False,
            soft_wrap=True,
        )

    serve_flower(settings, port=port, announce=announce)


@app.command(epilog="[bold]ROLLMILL_DATABASE_URL=postgresql://user:password@host:5432/name rollmill migrate[/]")
def migrate() -> None:
    """Bring the schema of the database in ROLLMILL_DATABASE_URL up to this program's."""
    settings = settings_for(None)
    from common.db.session import Database, head_revision
    from common.db.session import migrate as migrate_database

    database = Database.connect(settings.require_database_url())
    try:
        migrate_database(database)
    finally:
        database.dispose()
    Console().print(f"the database has schema {head_revision()}", highlight=False)


@db_app.command(epilog="[bold]rollmill db roles --passwords /etc/rollmill/roles[/]")
def roles(
    passwords: Annotated[
        Path | None,
        typer.Option(
            help="Lines `role password`; what is missing is made up.", show_default="roles in the data folder"
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="The roles are called PREFIX_init, PREFIX_run …")] = "rollmill",
    data_dir: DataDir = None,
) -> None:
    """Give each kind of process a Postgres role of its own, with the grants that it needs and no more.

    Run it again after `rollmill migrate`, to change passwords, or to mend grants.
    """
    settings = settings_for(data_dir)
    from deploy.access import open_database
    from deploy.roles import make_roles, roles_table

    file = (passwords or settings.data_dir / "roles").absolute()
    with open_database(settings) as database:
        made = make_roles(database, prefix=prefix, passwords_file=file)
    console = Console()
    console.print(roles_table(made))
    console.print(
        f"passwords: {file}; start each process with its own role in ROLLMILL_DATABASE_URL",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """Entry point. Exit code 2 = something has to be mended outside the program, 128 + n = stopped by signal n."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that knows no block characters
    try:
        _check_arguments(sys.argv[1:])
        app()
    except RollmillError as error:
        sys.exit(_explain(error))
    except KeyboardInterrupt:
        # Before the supervisor listens for signals: nothing is started yet.
        sys.exit(128 + signal.SIGINT)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise SetupError for one that is no text: names, paths and SQL end in a database that keeps text alone."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise SetupError(f"argument {argument!a} is not UTF-8") from None


def _explain(error: RollmillError) -> int:
    """Tell the person at the terminal; the exit code."""
    from deploy.supervisor import StopRequested

    if isinstance(error, StopRequested):
        return 128 + error.number
    Console(stderr=True).print(f"rollmill: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2 if isinstance(error, SetupError) else 1


if __name__ == "__main__":
    main()
