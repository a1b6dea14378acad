"""Answers of queries as tables on the terminal: whole, or shortened to what fits beside other things."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.db.engines import EngineStatus
from common.db.examples import Answer

MAX_ITEMS = 3
MAX_CELL = 44
PIPE_WIDTH = 1000
"""So that nothing is cut or wrapped where no terminal has a width."""


def table_console() -> Console:
    """Where a table goes."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def answer_table(answer: Answer, *, max_rows: int | None) -> Table:
    """The answer as a table. With `max_rows`, rows from the middle are left out and long values cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    numeric = [
        all(not isinstance(row[n], str | list | dict) for row in answer.rows) for n in range(len(answer.columns))
    ]
    for column, is_numeric in zip(answer.columns, numeric, strict=True):
        table.add_column(column, justify="right" if is_numeric else "left")
    num_rows = len(answer.rows)
    left_out = 0 if max_rows is None else max(num_rows - max_rows, 0)
    first = num_rows if not left_out else (num_rows - left_out + 1) // 2
    for number, row in enumerate(answer.rows):
        if number == first:
            table.add_row(*(f"… {left_out} more" if n == 0 else "" for n in range(len(row))), style="dim")
        if number < first or number >= first + left_out:
            table.add_row(*(Text(cell(value) if max_rows is None else short_cell(value)) for value in row))
    if not num_rows:
        table.add_row("no rows", style="dim")
    return table


def print_engines(found: Sequence[EngineStatus], *, console: Console) -> None:
    """Engines, one a row; below, a line for each whose last probe or load failed, says why."""
    console.print(_engines_table(found))
    for one in found:
        if one.error is not None:
            why = " ".join(one.error.split()).removeprefix(f"engine {one.url}").lstrip(": ")
            console.print(Text(f"{one.url}: {why}", style="red"), soft_wrap=not console.is_terminal)


def _engines_table(found: Sequence[EngineStatus]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("engine", "run", "state", "version", "wire", "answered", "loads", "refused", "failed"):
        # What is too narrow folds the names; where columns may not, all are cut, and figures with them.
        table.add_column(name, no_wrap=name not in ("run", "wire"), overflow="fold")
    for one in found:
        version = "-" if one.version is None else str(one.version)
        if one.version is not None and one.newest is not None and one.newest > one.version:
            version += f" of {one.newest}"
        answered = "never" if one.healthy_s is None else f"{max(one.healthy_s, 0):.0f} s ago"
        counts = [str(count) for count in (one.num_loads, one.num_refusals, one.num_failures)]
        table.add_row(one.url, one.run or "-", one.state.lower(), version, one.wire or "-", answered, *counts)
    if not found:
        table.add_row("no engines")
    return table


def tab_separated(answer: Answer) -> str:
    """The answer for other programs: a line of names, then a line a row, in full precision."""
    lines = [answer.columns, *(tuple("" if value is None else str(value) for value in row) for row in answer.rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def cell(value: object) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(cell(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def short_cell(value: object) -> str:
    """A value as text of one short line: long lists by their first items and their length."""
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        return "[" + ", ".join(cell(item) for item in value[:MAX_ITEMS]) + f", … {len(value)}]"
    text = " ".join(cell(value).split())
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
