"""Rows to start from."""

from __future__ import annotations

import pytest

from common.db.session import Database
from tests.integration.world import World, make_world


@pytest.fixture
def world(database: Database) -> World:
    return make_world(database)
