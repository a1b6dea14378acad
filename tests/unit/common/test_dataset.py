"""Data sets: what is read, and what is refused with the line's number."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.dataset import read_lines
from common.errors import SetupError


def test_a_data_set_is_split_at_newlines_only(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"q": "a\u2028b"}\n\n{"id": "x", "q": 2}\n')
    assert list(read_lines(file)) == [("1", {"q": "a\u2028b"}), ("x", {"id": "x", "q": 2})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}\nnope\n", "line 2 is not JSON"),
        ("[1]\n", "line 1 is no JSON object"),
        ('{"id": 2}\n{}\n', "line 2 has id '2' as line 1"),
        ("\n\n", "has no tasks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, expected: str):
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(SetupError, match=expected):
        list(read_lines(file))


def test_a_missing_data_set_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match=r"gone.jsonl cannot be read"):
        list(read_lines(tmp_path / "gone.jsonl"))
