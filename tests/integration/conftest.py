"""Rows to start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.db.session import Database
from tests.integration.broker_stack import Node
from tests.integration.world import World, make_world


@pytest.fixture
def world(database: Database) -> World:
    return make_world(database)


@pytest.fixture
def node(rabbitmq_url: str, rabbitmq_folder: Path) -> Node:
    return Node(url=rabbitmq_url, data_dir=rabbitmq_folder)
