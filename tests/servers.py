"""`python -m tests.servers FOLDER postgres|rabbitmq|valkey`: one server for the tests, until standard input is closed.

A process of its own: a supervisor ends whatever its process has adopted, and the tests make supervisors too.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

from common.errors import SetupError
from deploy.broker import prepare_valkey
from deploy.folder import DataFolder
from deploy.postgres import prepare_postgres
from deploy.rabbitmq import prepare_rabbitmq
from deploy.supervisor import Supervisor

POLL_S = 0.2


def start(kind: str, data: DataFolder, supervisor: Supervisor) -> str:
    """Start the server and wait for it; its URL."""
    if kind == "postgres":
        postgres = prepare_postgres(data)
        supervisor.start(postgres.process)
        return postgres.url
    broker = {"rabbitmq": prepare_rabbitmq, "valkey": prepare_valkey}[kind](data)
    supervisor.start(*broker.helpers, broker.process)
    return broker.url


def main(folder: Path, kind: str) -> int:
    """Print the server's URL when it answers. Exit code 2 = it cannot be had, and why is the only line."""
    try:
        with DataFolder(folder) as data, Supervisor(data) as supervisor:
            sys.stdout.write(f"{start(kind, data, supervisor)}\n")
            sys.stdout.flush()
            while not select.select([sys.stdin], [], [], POLL_S)[0]:
                supervisor.poll()
    except SetupError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
