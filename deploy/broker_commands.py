"""The commands about the broker: `rollmill broker`. Each looks at RabbitMQ, says what it found, and may mend it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.errors import SetupError
from common.settings import Settings
from deploy.options import DataDir, settings_for

WRONG = 1
"""Exit code of a check that found something wrong."""

broker_app = typer.Typer(no_args_is_help=True, help="RabbitMQ's own matters: its queues, dead letters and users.")


@broker_app.command(epilog="[bold]ROLLMILL_BROKER_QUEUES=quorum rollmill broker queues --recreate[/]")
def queues(
    recreate: Annotated[bool, typer.Option("--recreate", help="Delete them first, with their messages.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --recreate: even while fleets take from them.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Make the queues as ROLLMILL_BROKER_QUEUES wants them: classic, or quorum for a cluster.

    Another kind needs --recreate, while no fleet runs. Nothing is lost: the reaper announces every episode again.
    """
    given = _with_broker(data_dir)
    from deploy.broker_queues import make_queues

    num_messages = make_queues(given, recreate=recreate, force=force)
    if num_messages is None:
        _say(f"the {given.broker_queues} queues are there")
    else:
        _say(
            f"made the {given.broker_queues} queues anew; {num_messages} messages are gone: "
            "`python -m workers.reaper --resend-all` announces their episodes again"
        )


@broker_app.command(epilog="[bold]rollmill broker dead --purge[/]")
def dead(
    purge: Annotated[bool, typer.Option("--purge", help="Delete them.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Count the dead letters: messages that RabbitMQ gave up, as each worker that took them died.

    They are traces, not work: the reaper sends their episodes round again until these are done or FAILED, and
    `SELECT id, detail FROM episode WHERE state = 'FAILED'` says why.
    """
    given = _with_broker(data_dir)
    from deploy.broker_queues import dead_letters

    for name, number in dead_letters(given, purge=purge).items():
        _say(f"{name} {number}{' deleted' if purge else ''}")


@broker_app.command()
def check(data_dir: DataDir = None) -> None:
    """Compare RabbitMQ with the settings: version, queues, prefetch, consumer_timeout. Exit code 1 = all is not well.

    consumer_timeout is read where rabbitmqctl reaches the node; elsewhere ROLLMILL_BROKER_CONSUMER_TIMEOUT_S states it.
    """
    given = _with_broker(data_dir)
    from deploy.broker_queues import check_queues, queues_table

    state = check_queues(given)
    console = Console()
    _say(f"server            {state.server}")
    _say(f"consumer_timeout  {state.consumer_timeout}")
    console.print(queues_table(state))
    for trouble in state.troubles:
        Console(stderr=True).print(trouble, style="red", markup=False, highlight=False, soft_wrap=True)
    if state.troubles:
        raise typer.Exit(WRONG)


@broker_app.command(epilog="[bold]rollmill broker users --passwords /etc/rollmill/broker-users --apply[/]")
def users(
    apply: Annotated[bool, typer.Option("--apply", help="Give them to the node, which must run here.")] = False,
    passwords: Annotated[
        Path | None,
        typer.Option(
            help="Lines `user password`; what is missing is made up.", show_default="broker-users in the data folder"
        ),
    ] = None,
    prefix: Annotated[str, typer.Option(help="The users are called PREFIX_init, PREFIX_run …")] = "rollmill",
    data_dir: DataDir = None,
) -> None:
    """Give each kind of process a RabbitMQ user of its own, with the rights that it needs and no more.

    Make the queues first, with `rollmill broker queues`: these users may not. Again after an upgrade, or to change
    passwords.
    """
    given = _with_broker(data_dir)
    from deploy.broker_users import make_users, users_table

    made = make_users(
        given,
        prefix=prefix,
        passwords_file=(passwords or given.data_dir / "broker-users").absolute(),
        apply=apply,
    )
    Console().print(users_table(prefix=prefix))
    if made.applied:
        _say("the node has these users")
    else:
        _say(f"on the node: rabbitmqctl import_definitions < {made.definitions_file}")
    _say(f"passwords: {made.passwords_file}; start each process with its own user in ROLLMILL_BROKER_URL")


def _with_broker(data_dir: Path | None) -> Settings:
    """The settings with the broker of the stack that runs on the data folder, where they name none."""
    settings = settings_for(data_dir)
    from common.broker import is_rabbitmq
    from deploy.local import read_addresses

    url = settings.broker_url or read_addresses(settings.data_dir).broker_url
    if not is_rabbitmq(url):
        raise SetupError("the broker is no RabbitMQ: its queues are plain lists, which need none of this")
    return settings.model_copy(update={"broker_url": url})


def _say(line: str) -> None:
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
