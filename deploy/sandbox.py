"""The commands about sandboxes: `rollmill sandbox`. They start a worker's module, which knows the sandboxes."""

from __future__ import annotations

import subprocess
import sys

import typer

from deploy.options import DataDir, settings_for

sandbox_app = typer.Typer(no_args_is_help=True, help="Where agents' commands run.")


@sandbox_app.callback()
def sandbox() -> None:
    """Where agents' commands run."""


@sandbox_app.command(epilog="[bold]rollmill sandbox doctor[/]")
def doctor(data_dir: DataDir = None) -> None:
    """Say which sandboxes work on this node, what isolation they give, and how to get what is missing.

    Exit code 0: agents' commands get walls here. 1: they do not.
    """
    settings = settings_for(data_dir)
    command = [sys.executable, "-m", "workers.sandbox.doctor", "--data-dir", str(settings.data_dir)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
