from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RolloutConfig, RunConfig
from common.db.runs import DataCursor
from common.errors import SetupError
from workers.feeder import next_tasks, read_tasks

TASKS = list(range(100, 107))


def test_an_epoch_gives_each_task_once_in_an_order_of_its_own():
    order, cursor = next_tasks(TASKS, DataCursor(epoch=0, index=0), num=14, seed=3)
    first, second = order[:7], order[7:]
    assert sorted(first) == sorted(second) == TASKS
    assert first != second
    assert cursor == DataCursor(epoch=2, index=0)


def test_a_restart_neither_repeats_nor_skips():
    whole, _ = next_tasks(TASKS, DataCursor(epoch=0, index=0), num=12, seed=3)
    cursor, parts = DataCursor(epoch=0, index=0), []
    for num in (5, 1, 6):
        part, cursor = next_tasks(TASKS, cursor, num=num, seed=3)
        parts += part
    assert parts == whole


def test_seeds_give_different_orders():
    start = DataCursor(epoch=0, index=0)
    assert next_tasks(TASKS, start, num=7, seed=1)[0] != next_tasks(TASKS, start, num=7, seed=2)[0]


def config() -> RunConfig:
    return RunConfig(name="r", model=Path("m"), num_tasks=3)


def test_a_procedural_handler_makes_its_tasks():
    made = read_tasks(config())
    assert [key for key, _ in made] == ["0", "1", "2"]


def test_a_run_that_compacts_needs_a_handler_that_can():
    asking = config().model_copy(update={"rollout": RolloutConfig(compact_tokens=100)})
    with pytest.raises(SetupError, match=r"compact_tokens is set, but handler calculator has no method compact"):
        read_tasks(asking)
