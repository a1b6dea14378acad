from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RunConfig
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


def config(dataset: Path | None) -> RunConfig:
    return RunConfig(name="r", model=Path("m"), dataset=dataset, num_tasks=3)


def test_a_data_set_is_split_at_newlines_only(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": "a\u2028b"}\n\n{"id": "x", "q": 2}\n')
    assert list(read_tasks(config(file))) == [("1", {"q": "a\u2028b"}), ("x", {"id": "x", "q": 2})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}\nnope\n", "line 2 is not JSON"), ("[1]\n", "line 1 is no JSON object")],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, expected: str):
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(SetupError, match=expected):
        list(read_tasks(config(file)))


def test_a_missing_data_set_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match=r"gone.jsonl cannot be read"):
        list(read_tasks(config(tmp_path / "gone.jsonl")))


def test_a_procedural_handler_makes_its_tasks():
    made = list(read_tasks(config(None)))
    assert [key for key, _ in made] == ["0", "1", "2"]
