"""Opening the run that a command goes on with, and watching it through a database that goes away for a moment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg2
import pytest

from common.config import RunConfig, load_run_config
from common.config_train import TrainConfig
from common.db import engines, runs, versions
from common.db.session import Database
from common.episode import RunState
from common.errors import SetupError
from common.settings import Settings
from common.weights import Published
from deploy.broker import BrokerKind, prepare_valkey, why_away
from deploy.engine import EngineKind
from deploy.folder import DataFolder
from deploy.local import StackAddresses
from deploy.local_run import OpenRun, Order
from deploy.watch import RunReader

CONFIG = RunConfig(name="demo", model=Path("/nowhere"), train=TrainConfig(num_versions=3))
PUBLISHED = Published(location="/nowhere", manifest_sha256="0" * 64)
ORDER = Order(
    config=CONFIG,
    settings=Settings(),
    engine=EngineKind.SMALL,
    broker=BrokerKind.VALKEY,
    numbered=True,
    report_file=None,
    setup_s=None,
    keep_up=False,
    stall_limit_s=None,
)


def open_run(order: Order, database_url: str, tmp_path: Path) -> tuple[runs.Run, int | None]:
    """The run that is opened, and the version it goes on from."""
    addresses = StackAddresses(
        database_url=database_url, broker_url="", broker_api_url=None, engine_url="http://127.0.0.1:9"
    )
    with OpenRun(order, config_file=tmp_path / "run.toml") as opening:
        opening(addresses)
        return opening.run, opening.resumed_from_version


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not so after 20 s"
        time.sleep(0.02)


def test_a_new_run_gets_its_engine_and_a_configuration_that_the_trainer_can_read(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    run, resumed_from = open_run(ORDER, database_url, tmp_path)
    assert (run.name, resumed_from) == ("demo", None)
    assert load_run_config(tmp_path / "run.toml") == CONFIG
    with database.begin() as conn:
        (engine,) = engines.own(conn, "keeper", lease_s=1)
    assert (engine.url, engine.run_id) == ("http://127.0.0.1:9", run.id)


def test_the_same_command_goes_on_with_its_unfinished_run(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    first, _ = open_run(ORDER, database_url, tmp_path)
    with database.begin() as conn:
        for number in (0, 1):
            versions.publish(conn, first.id, number, PUBLISHED)
    assert open_run(ORDER, database_url, tmp_path) == (first, 1)


def test_after_a_finished_run_the_same_command_opens_the_next(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    names = []
    for _ in range(3):
        run, _ = open_run(ORDER, database_url, tmp_path)
        names.append(run.name)
        with database.begin() as conn:
            runs.finish(conn, run.id)
    assert names == ["demo", "demo-2", "demo-3"]
    assert load_run_config(tmp_path / "run.toml").name == "demo-3"


def test_another_configuration_gets_a_run_of_its_own_and_the_first_can_still_go_on(
    database_url: str, tmp_path: Path
) -> None:
    longer = replace(ORDER, config=CONFIG.model_copy(update={"train": TrainConfig(num_versions=9)}))
    assert open_run(ORDER, database_url, tmp_path)[0].name == "demo"
    assert open_run(longer, database_url, tmp_path)[0].name == "demo-2"
    assert open_run(ORDER, database_url, tmp_path)[0].name == "demo"


def test_a_run_with_a_name_of_its_own_is_not_numbered(database: Database, database_url: str, tmp_path: Path) -> None:
    named = replace(ORDER, numbered=False)
    run, _ = open_run(named, database_url, tmp_path)
    with database.begin() as conn:
        runs.finish(conn, run.id)
    with pytest.raises(SetupError, match="run demo is finished: give the new one another name"):
        open_run(named, database_url, tmp_path)


def test_engines_of_earlier_starts_are_forgotten_only_in_an_embedded_database(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    def urls_after(order: Order) -> list[str]:
        with database.begin() as conn:
            engines.register(conn, "http://127.0.0.1:1", run_id=run.id)
        open_run(order, database_url, tmp_path)
        with database.begin() as conn:
            return sorted(engine.url for engine in engines.own(conn, "keeper", lease_s=1))

    run, _ = open_run(ORDER, database_url, tmp_path)
    shared = replace(ORDER, settings=Settings(database_url=database_url))
    assert urls_after(shared) == ["http://127.0.0.1:1", "http://127.0.0.1:9"]
    assert urls_after(ORDER) == ["http://127.0.0.1:9"]


def test_reading_survives_a_database_that_is_away_for_a_moment(
    database: Database, database_url: str, postgres_url: str
) -> None:
    with database.begin() as conn:
        run = runs.open_run(conn, CONFIG)
    name = database_url.rpartition("/")[2]
    admin = psycopg2.connect(postgres_url)
    admin.autocommit = True
    with admin.cursor() as cursor, RunReader(database, run.id) as reader:
        wait_until(lambda: reader.latest.snapshot is not None)
        before = reader.latest

        cursor.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        wait_until(lambda: reader.latest.error is not None)
        assert reader.latest.snapshot is not None
        assert reader.latest.snapshot.state is RunState.ACTIVE
        away_at_s = reader.latest.at_s

        cursor.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        wait_until(lambda: reader.latest.error is None and reader.latest.at_s > away_at_s)
        assert reader.latest.snapshot == before.snapshot
    admin.close()


@contextmanager
def serving(argv: tuple[str, ...], url: str) -> Iterator[None]:
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: why_away(url, timeout_s=1.0) is None)
        yield
    finally:
        server.kill()
        server.wait()


def test_a_broker_that_goes_away_is_named_until_it_is_back(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    run, _ = open_run(ORDER, database_url, tmp_path)
    with DataFolder(tmp_path) as folder:
        broker = prepare_valkey(folder)
    with RunReader(database, run.id, broker_url=broker.url, ask_broker_every_s=0.1) as reader:
        wait_until(lambda: reader.latest.broker_away is not None)
        assert str(reader.latest.broker_away).startswith("redis://:***@127.0.0.1:")
        assert "refused" in str(reader.latest.broker_away)
        with serving(broker.process.argv, broker.url):
            wait_until(lambda: reader.latest.broker_away is None)
            assert reader.latest.snapshot is not None
        wait_until(lambda: reader.latest.broker_away is not None)
