"""What can be kept of the values that people write, in tasks and run files: Postgres and JSON refuse some of them."""

from __future__ import annotations

import math

MAX_DEPTH = 100
"""Lists and objects in one another. What parses these values, and prints them, calls itself for each level."""
MAX_COUNT = 2**31 - 1
"""The largest integer of a column."""
MAX_SMALL_COUNT = 2**15 - 1
"""The largest integer of a column that needs few bytes."""
MAX_TIME_S = 1e9
"""Some thirty years: timers of the operating system and intervals of the database take no more for granted."""


def check_storable(value: object) -> None:
    """Raise ValueError for a string, number or nesting in the value that JSON or Postgres cannot keep, naming it."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(item, str):
            _check_string(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is no finite number")
        elif isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]


def check_time(name: str | None, value: object) -> None:
    """Raise ValueError for a field in seconds that no timer takes."""
    if name is not None and name.endswith("_s") and isinstance(value, float) and value > MAX_TIME_S:
        raise ValueError(f"it is more than {MAX_TIME_S:g} seconds")


def _check_string(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"the string {_shown(text)} contains the character \\u0000, which Postgres cannot store")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        unpaired = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"the string {_shown(text)} contains half of a surrogate pair, {unpaired}") from None


def _shown(text: str) -> str:
    whole = ascii(text)
    return whole if len(whole) <= 60 else f"{whole[:59]}…"
