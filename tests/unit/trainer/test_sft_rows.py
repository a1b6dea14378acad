"""Rows of a file, and the line and field of each mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import TINY_MODELS
from common.errors import SetupError
from common.model_folder import read_model_shape
from trainer.sft_rows import read_rows

SHAPE = read_model_shape(TINY_MODELS / "tiny-calculator")
GOOD = '{"ids": [1, 2], "weights": [0, 1]}'


def test_a_row_is_what_the_line_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"ids": [5, 0, 575], "weights": [2, 0, 1.5], "from": "me"}\r\n\n' + GOOD)
    first, second = read_rows(path, shape=SHAPE)

    assert first.sample.ids_L.tolist() == [5, 0, 575]
    # Nothing stands before the first id that it could be learned from.
    assert first.sample.mask_L.tolist() == [False, False, True]
    assert first.weights_L.tolist() == [0, 0, 1.5]
    assert [row.where for row in (first, second)] == [f"{path}:2", f"{path}:4"]
    assert first.sample.key != second.sample.key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows.jsonl has no rows"),
        (f'{GOOD}\n{{"ids": [1, 2]}}', "rows.jsonl:2: weights: it is missing"),
        ('{"weights": [0, 1]}', "rows.jsonl:1: ids: it is missing"),
        ('{"ids": "12", "weights": [0, 1]}', "rows.jsonl:1: ids: '12' is no list"),
        ("[1, 2]", "rows.jsonl:1: it is no object with `ids` and `weights`"),
        ('{"ids": [1, 2], "weights": [1]}', "rows.jsonl:1: weights: there are 1, but 2 ids"),
        ('{"ids": [1, 2], "weights": [1, 0]}', "rows.jsonl:1: weights: no id after the first has one above 0"),
        ('{"ids": [], "weights": []}', "rows.jsonl:1: weights: no id after the first has one above 0"),
        ('{"ids": [1, 2], "weights": [0, 1e-60]}', "rows.jsonl:1: weights: no id after the first has one above 0"),
        ('{"ids": [1, 2], "weights": [0, NaN]}', r"rows.jsonl:1: weights\[1\]: nan is no number from 0 to 1e\+06"),
        ('{"ids": [1, 2], "weights": [0, Infinity]}', r"rows.jsonl:1: weights\[1\]: inf is no number"),
        ('{"ids": [1, 2], "weights": [0, -1]}', r"rows.jsonl:1: weights\[1\]: -1 is no number"),
        ('{"ids": [1, 2], "weights": [0, true]}', r"rows.jsonl:1: weights\[1\]: True is no number"),
        ('{"ids": [1, 2], "weights": [0, "1"]}', r"rows.jsonl:1: weights\[1\]: '1' is no number"),
        (f'{GOOD}\n\n{{"ids": [1, 576], "weights": [0, 1]}}', r":3: ids\[1\]: 576 is not in the .* vocabulary of 576"),
        ('{"ids": [-1, 2], "weights": [0, 1]}', r"rows.jsonl:1: ids\[0\]: -1 is not in"),
        ('{"ids": [1, 2.0], "weights": [0, 1]}', r"rows.jsonl:1: ids\[1\]: 2.0 is not in"),
        ('{"ids": [1, true], "weights": [0, 1]}', r"rows.jsonl:1: ids\[1\]: True is not in"),
        (
            f'{{"ids": {[1] * 513}, "weights": {[1] * 513}}}',
            r"rows.jsonl:1: ids: there are 513, more than the 512 positions of the model",
        ),
        (f"{GOOD}\n{{\n", "rows.jsonl:2: not JSON at column 2: Expecting property name"),
        ("[" * 100_000, "rows.jsonl:1: it is nested too deeply"),
    ],
)
def test_bad_rows_are_refused_by_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)

    with pytest.raises(SetupError, match=message):
        read_rows(path, shape=SHAPE)


def test_what_is_not_utf_8_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"ids": "\xff"}')

    with pytest.raises(SetupError, match=r"rows.jsonl:2: 'utf-8' codec can't decode"):
        read_rows(path, shape=SHAPE)
