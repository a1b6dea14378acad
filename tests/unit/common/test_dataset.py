"""Data sets: what is read, and what is refused with the line's number."""

from __future__ import annotations

import json
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
        ('{}\n{"x": [NaN]}', "line 2: NaN is no number of JSON"),
        ('{"x": -Infinity}', "line 1: -Infinity is no number of JSON"),
        ('{"x": {"y": -1e999}}', "line 1: -1e999 is too large for a number"),
        ('{"x": ["a\\u0000b"]}', r"line 1: the string 'a\\x00b' contains the character \\u0000"),
        ('{"\\u0000": 1}', r"line 1: the string '\\x00' contains the character"),
        ('{"x": "a\\ud800"}', r"line 1: the string 'a\\ud800' contains half of a surrogate pair, \\ud800"),
        ('{"id": "\\udc01"}', r"half of a surrogate pair, \\udc01"),
        pytest.param('{"x": ' + "[" * 100_000, "line 1: it is nested too deeply", id="deep"),
        ('{"x": ' + "[" * 100 + "]" * 100 + "}", "line 1: it is nested more than 100 levels deep"),
        ('{"x": {"y": 1, "y": 1}}', "line 1: the key 'y' stands twice in one object"),
        ('{"id": 1, "id": 2}', "line 1: the key 'id' stands twice"),
        pytest.param('{"x": ' + "9" * 5000 + "}", "line 1: Exceeds the limit", id="long number"),
        ('{"id": ""}', 'line 1: its id is "": give a string that is not empty, or a number'),
        ('{"id": null}', "line 1: its id is null"),
        ('{"id": true}', "line 1: its id is true"),
        ('{"id": [1]}', r"line 1: its id is \[1\]"),
        ('{"id": {"a": 1}}', "line 1: its id is {"),
        ('{"id": "' + "a" * 257 + '"}', "line 1: its id has 257 characters: give at most 256"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, expected: str):
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    with pytest.raises(SetupError, match=expected):
        list(read_lines(file))


def test_what_can_be_kept_is_read_as_it_stands(tmp_path: Path):
    file = tmp_path / "tasks.jsonl"
    nested = json.loads("[" * 99 + "]" * 99)
    tasks = [{"id": 0, "x": nested}, {"id": 1.5}, {"id": "a" * 256}, {"x": "\U0001f600", "y": 1e308, "z": None}]
    file.write_text("\n".join(map(json.dumps, tasks)))
    assert list(read_lines(file)) == list(zip(("0", "1.5", "a" * 256, "4"), tasks, strict=True))


def test_a_missing_data_set_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match=r"gone.jsonl cannot be read"):
        list(read_lines(tmp_path / "gone.jsonl"))
