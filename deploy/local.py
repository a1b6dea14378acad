"""The one-machine stack: which processes it has, in which order they start, and where each is reached.

Servers that `ROLLMILL_DATABASE_URL` or `ROLLMILL_BROKER_URL` name are used as they are; the others are started here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common.broker import is_rabbitmq
from common.db.session import Database
from common.episode import Stage
from common.errors import SetupError
from common.settings import Settings
from deploy.broker import BrokerKind, BrokerServer, check_broker, prepare_valkey
from deploy.broker_queues import replace_queues
from deploy.engine import EngineKind, engine_spec
from deploy.folder import DataFolder, free_bytes, write_private
from deploy.ports import HOST, kept_port, require_free
from deploy.postgres import prepare_postgres
from deploy.process import ProcessSpec, Restart
from deploy.rabbitmq import prepare_rabbitmq
from deploy.supervisor import ProcessStatus, Supervisor
from deploy.vllm import LoraPlan

PREPARE = {BrokerKind.VALKEY: prepare_valkey, BrokerKind.RABBITMQ: prepare_rabbitmq}
LOOK_AT_DISK_EVERY_S = 2.0
MIN_FREE_BYTES_AT_WORK = 100_000_000
"""Enough for an orderly end: a database whose disk is full stops in the middle of everything."""


@dataclass(frozen=True, kw_only=True)
class StackAddresses:
    """Where the stack's servers are reached. Passwords inside: never log it."""

    database_url: str
    broker_url: str
    broker_api_url: str | None
    """HTTP API of the broker; None = it has none, or the broker is not ours."""
    engine_url: str
    consumer_timeout_s: float | None = None
    """How long the broker lets a worker hold a message; None = for ever, or the settings say."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What the caller decides about a stack."""

    model_dir: Path
    """The engine's start weights and tokenizer."""
    trainer_config: Path | None
    """None = no trainer."""
    trainer: str = "trainer"
    """Module that trains: `python -m TRAINER --config FILE`."""
    broker: BrokerKind = BrokerKind.VALKEY
    """Which broker to start, where the settings name none."""
    engine: EngineKind = EngineKind.SMALL
    engine_port: int | None = None
    """None = a free one."""
    lora: LoraPlan | None = None
    """What the engine must be able to hold; None = no adapters."""
    max_row_tokens: int | None = None
    """The run's, which the engine's context must hold."""


class LocalStack:
    """Context manager: inside the block the data folder is ours; leaving it stops every process."""

    def __init__(self, settings: Settings, plan: StackPlan, *, free_bytes: Callable[[Path], int] = free_bytes) -> None:
        self._settings = settings
        self._plan = plan
        self.folder = DataFolder(settings.data_dir)
        self._free_bytes = free_bytes
        self._looked_at_disk_s = float("-inf")
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> Self:
        """Raises SetupError where the folder cannot be used."""
        self.folder.__enter__()
        addresses_file(self.folder.path).unlink(missing_ok=True)
        try:
            self._supervisor = Supervisor(self.folder)
            self._supervisor.__enter__()
        except BaseException:
            self.folder.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        addresses_file(self.folder.path).unlink(missing_ok=True)
        try:
            self.supervisor.__exit__(kind, error, trace)
        finally:
            self.folder.__exit__(kind, error, trace)

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "use the stack inside its with block"
        return self._supervisor

    def start(self, make_ready: Callable[[StackAddresses], None]) -> StackAddresses:
        """Start everything and wait until it answers.

        make_ready: called when database and broker answer and nothing else runs; migrates, and creates the run.
        Raises SetupError that names what does not come up, StopRequested on Ctrl-C.
        """
        addresses = self._start_servers()
        make_ready(addresses)
        self.supervisor.start(*work_specs(addresses, plan=self._plan, data_dir=self.folder.path))
        write_private(addresses_file(self.folder.path), addresses.to_json())
        return addresses

    def poll(self) -> None:
        """Keep the processes alive; call it several times a second.

        Raises as Supervisor.poll, and SetupError when the disk of the data folder fills up.
        """
        self.supervisor.poll()
        if time.monotonic() - self._looked_at_disk_s >= LOOK_AT_DISK_EVERY_S:
            self._looked_at_disk_s = time.monotonic()
            self._check_free_space()

    def statuses(self) -> list[ProcessStatus]:
        return self.supervisor.statuses()

    def _check_free_space(self) -> None:
        free = self._free_bytes(self.folder.path)
        if free < MIN_FREE_BYTES_AT_WORK:
            raise SetupError(
                f"only {free / 1e6:.0f} MB free for data folder {self.folder.path}: make room; "
                "the same command goes on from here"
            )

    def _start_servers(self) -> StackAddresses:
        engine_port = self._engine_port()
        # The slow broker boots while the database is made.
        broker = self._launch_broker()
        database_url = self._settings.database_url or self._launch_postgres()
        self.supervisor.wait_ready()
        if self._settings.database_url:
            Database.connect(database_url).dispose()
        if self._settings.broker_url:
            check_broker(self._settings.broker_url)
        if broker is not None and is_rabbitmq(broker.url):
            # They may be of another kind since the last start.
            replace_queues(self._settings.model_copy(update={"broker_url": broker.url}))
        return StackAddresses(
            database_url=database_url,
            broker_url=self._settings.broker_url or (broker.url if broker else ""),
            broker_api_url=broker.api_url if broker else None,
            engine_url=f"http://{HOST}:{engine_port}",
            consumer_timeout_s=broker.consumer_timeout_s if broker else None,
        )

    def _engine_port(self) -> int:
        if self._plan.engine_port is not None:
            return require_free(self._plan.engine_port, what="the engine")
        return kept_port(self.folder.run / "engine.port")

    def _launch_broker(self) -> BrokerServer | None:
        if self._settings.broker_url:
            return None
        server = PREPARE[self._plan.broker](self.folder)
        self.supervisor.start(*server.helpers)
        self.supervisor.launch(server.process)
        return server

    def _launch_postgres(self) -> str:
        server = prepare_postgres(self.folder)
        self.supervisor.launch(server.process)
        return server.url


def work_specs(addresses: StackAddresses, *, plan: StackPlan, data_dir: Path) -> list[ProcessSpec]:
    """Engine, fleets, feeder, reaper and trainer, if any. They import for seconds, so they start together."""
    env = {
        "ROLLMILL_DATABASE_URL": addresses.database_url,
        "ROLLMILL_BROKER_URL": addresses.broker_url,
        "ROLLMILL_DATA_DIR": str(data_dir),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if addresses.consumer_timeout_s is not None:
        env["ROLLMILL_BROKER_CONSUMER_TIMEOUT_S"] = f"{addresses.consumer_timeout_s:g}"

    def python(name: str, *arguments: str, **treatment: Any) -> ProcessSpec:
        return ProcessSpec(name=name, argv=(sys.executable, "-m", *arguments), env=env, **treatment)

    engine_port = int(addresses.engine_url.rpartition(":")[2])
    specs = [
        engine_spec(
            plan.engine,
            model=plan.model_dir,
            port=engine_port,
            env=env,
            lora=plan.lora,
            max_row_tokens=plan.max_row_tokens,
        ),
        *(python(f"fleet-{stage}", "workers.fleet", stage) for stage in Stage),
        python("feeder", "workers.feeder"),
        python("reaper", "workers.reaper", "--resend-all"),
    ]
    if plan.trainer_config is not None:
        arguments = (plan.trainer, "--config", str(plan.trainer_config))
        specs.append(python("trainer", *arguments, restart=Restart.ON_FAILURE, stop_timeout_s=30.0))
    return specs


def addresses_file(data_dir: Path) -> Path:
    """Where a running stack notes its addresses for other commands."""
    return data_dir / "run" / "addresses.json"


def read_addresses(data_dir: Path) -> StackAddresses:
    """The addresses of the stack that runs on this data folder. Raises SetupError when none does."""
    try:
        return StackAddresses(**json.loads(addresses_file(data_dir).read_text()))
    except FileNotFoundError:
        raise SetupError(f"no stack runs on data folder {data_dir.absolute()}: start one with `rollmill up`") from None
