"""Services for the tests: a real Postgres and brokers, started once, and an empty migrated database for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg2
import pytest
import redis
from hypothesis import settings

from common.db.session import Database, migrate
from tests.virtual_hosts import virtual_host

IN_CI = bool(os.environ.get("CI"))

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("rollmill", deadline=None)
settings.load_profile("rollmill")


@contextmanager
def server(kind: str, folder: Path) -> Iterator[str]:
    """URL of a server of our own. One that is not installed fails the tests in CI and skips them on a laptop."""
    argv = [sys.executable, "-m", "tests.servers", str(folder), kind]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if "://" not in line:
            if IN_CI:
                pytest.fail(f"no {kind}: {line}")
            pytest.skip(line)
        yield line
        process.communicate()


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Postgres server of our own, or the one that TEST_DATABASE_URL names."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        yield url
        return
    with server("postgres", tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of the private RabbitMQ node."""
    return tmp_path_factory.mktemp("rabbitmq")


@pytest.fixture(scope="session")
def rabbitmq_node(rabbitmq_folder: Path) -> Iterator[str]:
    """A private RabbitMQ node."""
    with server("rabbitmq", rabbitmq_folder) as url:
        yield url


@pytest.fixture
def rabbitmq_url(rabbitmq_node: str, rabbitmq_folder: Path) -> Iterator[str]:
    """An empty virtual host of this test's own on the private RabbitMQ node."""
    with virtual_host(rabbitmq_node, rabbitmq_folder) as url:
        yield url


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A valkey server."""
    with server("valkey", tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def valkey_url(valkey_server: str) -> str:
    """A valkey server with nothing in it."""
    with redis.from_url(valkey_server) as client:
        client.flushall()
    return valkey_server


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> str:
    """Name of a migrated database that each test's own is cloned from."""
    name = f"template_{uuid4().hex[:8]}"
    _execute(postgres_url, f"CREATE DATABASE {name}")
    database = Database.connect(_url(postgres_url, name))
    migrate(database)
    database.dispose()
    return name


@contextmanager
def clone(postgres_url: str, template_database: str) -> Iterator[str]:
    """URL of a new database like the template; it is dropped at the end of the block."""
    name = f"test_{uuid4().hex[:8]}"
    _execute(postgres_url, f"CREATE DATABASE {name} TEMPLATE {template_database}")
    yield _url(postgres_url, name)
    _execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(postgres_url: str, template_database: str) -> Iterator[str]:
    """URL of an empty, migrated database of this test's own."""
    with clone(postgres_url, template_database) as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty, migrated database."""
    database = Database.connect(database_url)
    yield database
    database.dispose()


def _url(server: str, name: str) -> str:
    return f"{server.rpartition('/')[0]}/{name}"


def _execute(url: str, statement: str) -> None:
    connection = psycopg2.connect(url)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
    finally:
        connection.close()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parent.parent
