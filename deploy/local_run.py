"""One run on the one-machine stack, from start to report: starts the stack, watches, reports, stops."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import tomli_w
from rich.console import Console

from common.config import RunConfig
from common.db import engines, resume, runs, step_troubles, versions
from common.db.session import Database, migrate
from common.episode import RunState
from common.errors import SetupError
from common.settings import Settings
from deploy.broker import BrokerKind
from deploy.display import open_display
from deploy.engine import EngineKind, check_engine_installed, check_small_context
from deploy.local import LocalStack, StackAddresses, StackPlan
from deploy.messages import logging_to
from deploy.report import Report, Seconds, Session, check_writable, read_report
from deploy.summary import present
from deploy.supervisor import StopRequested
from deploy.vllm import lora_plan
from deploy.watch import POLL_EVERY_S, RunReader, Watched, watch


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the user asked for."""

    config: RunConfig
    settings: Settings
    broker: BrokerKind
    engine: EngineKind
    numbered: bool
    """The name in the configuration is a stem: go on with its newest unfinished run, or open the next one."""
    report_file: Path | None
    setup_s: float | None
    """Seconds that installing took; None = not told."""
    keep_up: bool
    """Stay up after the end of the run."""
    stall_limit_s: float | None
    """See `Watched.stall_limit_s`."""
    trainer: str = "trainer"
    """See `StackPlan.trainer`."""


class OpenRun:
    """Called by the stack when its servers answer: brings the schema up to date, opens the run, names its engine.

    Context manager: the connections are closed at the end of the block.
    """

    def __init__(self, order: Order, *, config_file: Path) -> None:
        self._order = order
        self._config_file = config_file
        self._database: Database | None = None
        self.run: runs.Run
        self.resumed_from_version: int | None
        """Newest version at the start; None = the run is new."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._database is not None:
            self._database.dispose()

    def __call__(self, addresses: StackAddresses) -> None:
        self._database = Database.connect(addresses.database_url)
        migrate(self._database)
        config = self._order.config
        with self._database.begin() as conn:
            if self._order.numbered:
                config = config.model_copy(update={"name": resume.name_to_go_on(conn, config)})
            self.run = runs.open_run(conn, config)
            step_troubles.forget(conn, self.run.id)
            newest = versions.newest(conn, self.run.id)
            self.resumed_from_version = None if newest is None else newest.number
            check_goes_on(self.run, pause_reason=runs.pause_reason_of(conn, self.run.id))
            if self._order.settings.database_url is None:
                # Nobody else uses an embedded database: other engines are those of earlier starts.
                engines.forget_others(conn, [addresses.engine_url])
            engines.register(conn, addresses.engine_url, run_id=self.run.id)
        self._config_file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))

    @property
    def database(self) -> Database:
        assert self._database is not None, "the stack has not started"
        return self._database


def check_goes_on(run: runs.Run, *, pause_reason: str | None) -> None:
    """Raise SetupError for a run that is paused or over. `pause_reason`: see `runs.pause_reason_of`."""
    if run.state is RunState.PAUSED:
        why = "" if pause_reason is None else f" ({pause_reason})"
        raise SetupError(f"run {run.name} is paused{why}: let it go on with `rollmill run resume {run.name}`")
    if run.state is not RunState.ACTIVE:
        raise SetupError(
            f"run {run.name} is {run.state.lower()}: give the new one another name, "
            f"or look at the old one with `rollmill report {run.name}`{_or_extend(run)}"
        )


def _or_extend(run: runs.Run) -> str:
    if run.state is not RunState.FINISHED or run.config.train.num_versions == 0:
        return ""
    return f", or train it further with `rollmill run extend {run.name} --versions N`"


def run_locally(order: Order, *, console: Console) -> None:
    """Take a run to its end and report. Raises SetupError, and StopRequested after an orderly stop."""
    started_s = time.monotonic()
    if order.report_file is not None:
        check_writable(order.report_file)
    check_engine_installed(order.engine)
    check_small_context(order.engine, order.config)
    data_dir = order.settings.data_dir
    config_file = data_dir / "run.toml"
    plan = StackPlan(
        model_dir=order.config.model,
        trainer_config=config_file,
        trainer=order.trainer,
        broker=order.broker,
        engine=order.engine,
        lora=lora_plan(order.config.train),
        max_row_tokens=order.config.rollout.max_row_tokens,
    )
    console.print(f"starting on data folder {data_dir} …", highlight=False, soft_wrap=True)
    with LocalStack(order.settings, plan) as stack:
        log_file = stack.folder.log_file("rollmill")
        with logging_to(log_file, level=order.settings.log_level, console=console):
            report = _run_to_its_end(stack, order, config_file=config_file, console=console, started_s=started_s)
            if order.keep_up:
                present(report, console=console, data_dir=data_dir, json_file=order.report_file)
                _stay(stack, console=console)
            stopping_s = time.monotonic()
    if not order.keep_up:
        report = report.stopped(time.monotonic() - stopping_s)
        present(report, console=console, data_dir=data_dir, json_file=order.report_file)


def _run_to_its_end(
    stack: LocalStack, order: Order, *, config_file: Path, console: Console, started_s: float
) -> Report:
    with OpenRun(order, config_file=config_file) as opening:
        try:
            with console.status("database, broker, engine, fleets, feeder, reaper, trainer"):
                stack.start(opening)
            up_s = time.monotonic()
            _announce(opening, console=console, start_s=up_s - started_s)
            watched = Watched(
                config=opening.run.config,
                data_folder=stack.folder.path,
                started_s=started_s,
                stall_limit_s=order.stall_limit_s,
            )
            broker_url = order.settings.broker_url
            with (
                RunReader(opening.database, opening.run.id, broker_url=broker_url) as reader,
                open_display(console) as display,
            ):
                watch(watched, stack=stack, latest=lambda: reader.latest, display=display)
        except StopRequested as stop:
            console.print(
                f"{stop}: ending all processes; the same command goes on from here", highlight=False, soft_wrap=True
            )
            raise
        session = Session(
            seconds=Seconds(setup=order.setup_s, start=up_s - started_s, train=time.monotonic() - up_s, stop=None),
            resumed_from_version=opening.resumed_from_version,
            restarts={process.name: process.restarts for process in stack.statuses()},
        )
        return read_report(opening.database, opening.run, session=session)


def _announce(opening: OpenRun, *, console: Console, start_s: float) -> None:
    version = opening.resumed_from_version
    how = "a new run" if version is None else f"goes on from version {version}"
    console.print(f"all up after {start_s:.1f} s; {opening.run.name}: {how}", highlight=False, soft_wrap=True)


def _stay(stack: LocalStack, *, console: Console) -> None:
    """Keep the processes alive until somebody asks us to stop; that is then the orderly end."""
    console.print("\nstill up; Ctrl-C ends all processes")
    try:
        while True:
            stack.poll()
            time.sleep(POLL_EVERY_S)
    except StopRequested as stop:
        console.print(f"{stop}: ending all processes", highlight=False)
