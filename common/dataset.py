"""Data sets: JSON lines, one task a line. Read by the feeder, and before anything starts by whoever is told of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

from common.errors import SetupError


def read_lines(dataset: Path) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    """(key, payload) of each task; the key is the task's `id`, or else the number of its line.

    Raises SetupError that names the file and the line that is not a JSON object, or has the key of another.
    """
    try:
        # Not splitlines(): a line separator of Unicode inside a string is no end of line in JSON lines.
        lines = dataset.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"data set {dataset} cannot be read: {error}") from None
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            payload = _parse(dataset, number, line)
            key = str(payload.get("id", number))
            if (other := seen.setdefault(key, number)) != number:
                raise SetupError(f"data set {dataset} line {number} has id {key!r} as line {other}: give each its own")
            yield key, payload
    if not seen:
        raise SetupError(f"data set {dataset} has no tasks")


def content_key(payload: dict[str, JsonValue]) -> str:
    """A key for a task that names none: the same contents have the same."""
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:16]


def _parse(dataset: Path, number: int, line: str) -> dict[str, JsonValue]:
    try:
        payload = json.loads(line)
    except ValueError as error:
        raise SetupError(f"data set {dataset} line {number} is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise SetupError(f"data set {dataset} line {number} is no JSON object: {line:.60}")
    return payload
