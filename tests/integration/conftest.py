"""Rows to start from, and the command line beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.db.session import Database
from tests.integration.broker_stack import Node
from tests.integration.world import World, make_world

Answer = tuple[int, str]
"""Exit code, and all that was said."""


REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = []


def pytest_unconfigure(config: pytest.Config) -> None:
    for line in config.stash.get(REPORT, []):
        sys.stdout.write(f"{line}\n")


@pytest.fixture
def world(database: Database) -> World:
    return make_world(database)


@pytest.fixture
def rollmill(world: World, database_url: str) -> Callable[..., Answer]:
    """The command line beside the world's database."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}

    def call(*arguments: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments],
            env={**environment, "ROLLMILL_DATABASE_URL": database_url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.fixture
def node(rabbitmq_url: str, rabbitmq_folder: Path) -> Node:
    return Node(url=rabbitmq_url, data_dir=rabbitmq_folder)
