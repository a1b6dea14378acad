"""Data sets: JSON lines, one task a line. Read by the feeder, and before anything starts by whoever is told of one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from common.errors import SetupError
from common.storable import check_storable

MAX_ID_CHARACTERS = 256
"""Of a task's key, which is in an index."""


def read_lines(dataset: Path) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    """(key, payload) of each task; the key is the task's `id`, or else the number of its line.

    Raises SetupError that names the file and the line that is not a JSON object, cannot be stored, or has the key of
    another.
    """
    try:
        # Not splitlines(): a line separator of Unicode inside a string is no end of line in JSON lines.
        lines = dataset.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"data set {dataset} cannot be read: {error}") from None
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            payload = _parse(dataset, number, line)
            key = key_of(payload, otherwise=str(number))
            if (other := seen.setdefault(key, number)) != number:
                raise SetupError(f"data set {dataset} line {number} has id {key!r} as line {other}: give each its own")
            yield key, payload
    if not seen:
        raise SetupError(f"data set {dataset} has no tasks")


def key_of(payload: dict[str, JsonValue], *, otherwise: str) -> str:
    """The task's `id`, or what stands for it where it names none."""
    return str(payload["id"]) if "id" in payload else otherwise


def content_key(payload: dict[str, JsonValue]) -> str:
    """A key for a task that names none: the same contents have the same."""
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:16]


def _parse(dataset: Path, number: int, line: str) -> dict[str, JsonValue]:
    where = f"data set {dataset} line {number}"
    try:
        payload = json.loads(
            line, object_pairs_hook=_object, parse_float=_finite_number, parse_constant=_refuse_constant
        )
        if not isinstance(payload, dict):
            raise SetupError(f"{where} is no JSON object: {line:.60}")
        check_storable(payload)
        _check_id(payload)
    except json.JSONDecodeError as error:
        raise SetupError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise SetupError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise SetupError(f"{where}: {error}") from None
    return payload


def _object(pairs: Sequence[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """An object of the line. Of a key that stands twice, one value would be lost in silence."""
    made: dict[str, JsonValue] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!a:.60} stands twice in one object")
        made[key] = value
    return made


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.60} is too large for a number")
    return value


def _refuse_constant(text: str) -> JsonValue:
    raise ValueError(f"{text} is no number of JSON")


def _check_id(payload: dict[str, JsonValue]) -> None:
    if "id" not in payload:
        return
    given = payload["id"]
    if isinstance(given, bool) or not isinstance(given, str | int | float) or given == "":
        raise ValueError(f"its id is {json.dumps(given):.60}: give a string that is not empty, or a number")
    if len(str(given)) > MAX_ID_CHARACTERS:
        raise ValueError(f"its id has {len(str(given))} characters: give at most {MAX_ID_CHARACTERS}")
