"""When a process that keeps ending is given up: it depends on how it ends, and hardly on how fast the machine is."""

from __future__ import annotations

import pytest

from deploy.crash_policy import CrashPolicy


@pytest.mark.parametrize(
    ("exit_code", "lived_s", "is_soon"),
    [(2, 599, True), (2, 601, False), (75, 59, True), (75, 601, False), (1, 30, True), (1, 61, False), (-9, 30, False)],
)
def test_how_long_a_process_must_live_depends_on_how_it_ends(exit_code: int, lived_s: float, is_soon: bool) -> None:
    assert CrashPolicy().is_soon(exit_code, lived_s) == is_soon


@pytest.mark.parametrize(
    ("row", "is_enough"),
    [
        ([2, 2], False),
        ([2, 2, 2], True),
        ([2, 1, 2, -9], False),
        ([2, 1, 2, -9, 1], True),
        ([1, 1, 2], False),
        ([75] * 9 + [1, 1], False),
    ],
)
def test_a_row_of_ends_is_enough_by_its_kinds(row: list[int], is_enough: bool) -> None:
    assert CrashPolicy().is_enough(row) == is_enough
