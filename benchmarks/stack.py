"""A whole stack with several processes of each kind, under our own supervisor, for the chaos and pipeline checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.config import RunConfig
from common.db import engines, runs
from common.db.runs import Run
from common.db.session import Database, migrate
from common.episode import Stage
from deploy.crash_policy import CrashPolicy
from deploy.folder import DataFolder
from deploy.ports import HOST, free_port, http_ok
from deploy.postgres import prepare_postgres
from deploy.process import ProcessSpec, Restart
from deploy.rabbitmq import prepare_rabbitmq
from deploy.supervisor import Supervisor

NEVER_GIVE_UP = CrashPolicy(soon_s=0.0, failed_soon_s=0.0, lived_s=0.0)
"""No end counts as a crash soon after the start: here it is us who end the processes."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """A running database and broker, and the supervisor for all that joins them."""

    supervisor: Supervisor
    data_dir: Path
    env: Mapping[str, str]
    """What the stack's processes need to know."""
    database: Database
    database_url: str
    broker_url: str

    def python(self, name: str, *arguments: str, restart: Restart = Restart.ALWAYS) -> ProcessSpec:
        """A process of ours."""
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", *arguments),
            env=self.env,
            restart=restart,
            stop_timeout_s=20.0,
        )

    def fleets(self, num: Mapping[Stage, int]) -> list[ProcessSpec]:
        """`num` processes for each stage, called fleet-STAGE-0, 1 …"""
        return [
            self.python(f"fleet-{stage}-{index}", "workers.fleet", stage)
            for stage, count in num.items()
            for index in range(count)
        ]

    def start_engines(self, run: Run, num: int, *arguments: str) -> None:
        """Start scripted engines on free ports and give them to the run."""
        ports = [free_port() for _ in range(num)]
        specs = [
            ProcessSpec(
                name=f"engine-{index}",
                argv=(sys.executable, "-m", "benchmarks.scripted_policy", *arguments, "--port", str(port)),
                ready=http_ok(port, "/health"),
            )
            for index, port in enumerate(ports)
        ]
        self.supervisor.start(*specs)
        with self.database.begin() as conn:
            for port in ports:
                engines.register(conn, f"http://{HOST}:{port}", run_id=run.id)

    def open_run(self, config: RunConfig) -> Run:
        with self.database.begin() as conn:
            return runs.open_run(conn, config)


@contextmanager
def servers(data_dir: Path, settings: Mapping[str, str]) -> Iterator[Servers]:
    """A private RabbitMQ node and a private Postgres with the schema; all processes end with the block."""
    with DataFolder(data_dir) as folder, Supervisor(folder, crash_policy=NEVER_GIVE_UP) as supervisor:
        broker, postgres = prepare_rabbitmq(folder), prepare_postgres(folder)
        supervisor.start(*broker.helpers)
        supervisor.launch(broker.process, postgres.process)
        supervisor.wait_ready()
        database = Database.connect(postgres.url)
        try:
            migrate(database)
            yield Servers(
                supervisor=supervisor,
                data_dir=data_dir,
                env={
                    "ROLLMILL_DATABASE_URL": postgres.url,
                    "ROLLMILL_BROKER_URL": broker.url,
                    "ROLLMILL_BROKER_CONSUMER_TIMEOUT_S": f"{broker.consumer_timeout_s:g}",
                    "ROLLMILL_DATA_DIR": str(data_dir),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                    **settings,
                },
                database=database,
                database_url=postgres.url,
                broker_url=broker.url,
            )
        finally:
            database.dispose()
