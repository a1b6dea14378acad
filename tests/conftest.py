"""Services for the tests: a real Postgres and brokers, started once, and an empty migrated database for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg2
import pytest

from common.db.session import Database, migrate
from common.errors import SetupError
from deploy.folder import DataFolder
from deploy.postgres import prepare_postgres
from deploy.rabbitmq import prepare_rabbitmq
from deploy.supervisor import Supervisor

IN_CI = bool(os.environ.get("CI"))


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """A supervisor for the servers of this test session."""
    with DataFolder(tmp_path_factory.mktemp("services")) as folder, Supervisor(folder) as supervisor:
        yield supervisor


@pytest.fixture(scope="session")
def postgres_url(services: Supervisor) -> str:
    """A Postgres server of our own, or the one that TEST_DATABASE_URL names."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        return url
    server = prepare_postgres(services.folder)
    services.start(server.process)
    return server.url


@pytest.fixture(scope="session")
def rabbitmq_url(services: Supervisor) -> str:
    """A private RabbitMQ node. Missing, it fails the tests in CI and skips them on a laptop."""
    try:
        server = prepare_rabbitmq(services.folder)
    except SetupError as error:
        if IN_CI:
            raise
        pytest.skip(str(error))
    services.start(*server.helpers, server.process)
    return server.url


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> str:
    """Name of a migrated database that each test's own is cloned from."""
    name = f"template_{uuid4().hex[:8]}"
    _execute(postgres_url, f"CREATE DATABASE {name}")
    database = Database.connect(_url(postgres_url, name))
    migrate(database)
    database.dispose()
    return name


@pytest.fixture
def database_url(postgres_url: str, template_database: str) -> Iterator[str]:
    """URL of an empty, migrated database of this test's own."""
    name = f"test_{uuid4().hex[:8]}"
    _execute(postgres_url, f"CREATE DATABASE {name} TEMPLATE {template_database}")
    yield _url(postgres_url, name)
    _execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


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
