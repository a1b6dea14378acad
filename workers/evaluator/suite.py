"""Tests of an agent's files, and what came of them. `Judge` runs them; a handler makes a score of the report.

Where the expected value stays out here (Call, Program), the code under test can only pass by giving it. An InProcess
test shares its interpreter with that code, which can lie: canaries, one of each function, show most lies.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import JsonValue

MAX_INPUT_BYTES = 60_000
"""What a test's process is given at its start: as much as a pipe holds."""
MAX_DEPTH = 50


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of the agent's is called; its result comes out as JSON and is compared out here."""

    name: str
    module: str
    """Of the agent's files, as it is imported."""
    function: str
    arguments: tuple[JsonValue, ...]
    expected: JsonValue
    """Never enters the sandbox. Numbers with a fraction are compared to nine digits, however small they are; where 0 is
    expected, what rounding leaves of it (1e-12) will do."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program is given input; what it prints is compared out here, but for white space at the end."""

    name: str
    argv: tuple[str, ...]
    """In the folder of the agent's files; the first is looked for in the PATH. It must exit with 0."""
    input: str = ""
    expected: str
    """Never enters the sandbox."""


@dataclass(frozen=True, kw_only=True)
class InProcess:
    """Functions without arguments in Python, which pass if they return None. Each is run in a process of its own.

    Raises ValueError when the source lacks one of them, or there are none.
    """

    source: str
    """Never lies in a file. It imports the agent's modules, or those among the tests' own files."""
    functions: tuple[str, ...]
    canary: str
    """A function that no honest solution passes: a call with a wrong expectation. If it passes, the agent tampered."""

    def __post_init__(self) -> None:
        try:
            body = ast.parse(self.source).body
        except SyntaxError as error:
            raise ValueError(f"the tests' source is no Python: {error}") from None
        there = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if missing := {*self.functions, self.canary} - there:
            raise ValueError(f"the tests' source has no function {', '.join(sorted(missing))}")
        if not self.functions:
            raise ValueError(f"functions is empty: canary {self.canary} alone tests nothing")


Test = Call | Program | InProcess


class Fault(StrEnum):
    """Why a test did not pass. All of them are the agent's doing."""

    WRONG = "wrong"
    """Another result than expected."""
    ERROR = "error"
    """It raised, or exited with an error."""
    TIME = "time"
    """It did not end in time, or there was no time left for it."""
    LIMIT = "limit"
    """It met another limit of the sandbox."""
    FORGED = "forged"
    """What it said is not what the runner says: nothing, too much, or in another order."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one test."""

    name: str
    fault: Fault | None
    """None = it passed."""
    detail: str = ""
    """For people; may be of the agent's making."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of all tests, in the order in which they were given."""

    results: tuple[Result, ...]
    passed_canaries: tuple[str, ...] = ()
    """Of those that must fail. Any = the agent made tests pass that it did not: no result is worth anything."""

    @property
    def tampered(self) -> bool:
        """Whether the agent tampered with its tests."""
        return bool(self.passed_canaries)

    @property
    def num_passed(self) -> int:
        """0 if the agent tampered."""
        return 0 if self.tampered else sum(result.fault is None for result in self.results)

    @property
    def fraction_passed(self) -> float:
        """0 … 1; 0 without tests."""
        return self.num_passed / len(self.results) if self.results else 0.0

    @property
    def parts(self) -> Mapping[str, float]:
        """For `Score.parts`: tests that passed, faults by kind."""
        faults = Counter(result.fault for result in self.results if result.fault is not None)
        counted = {f"tests_{fault}": float(num) for fault, num in sorted(faults.items())}
        return {"tests": float(len(self.results)), "tests_passed": float(self.num_passed), **counted}


def same(given: object, expected: object, *, depth: int = 0) -> bool:
    """Whether two JSON values are equal, of equal types too: True is not 1. Floats as `Call.expected` says."""
    if depth > MAX_DEPTH:
        return False
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, float) or isinstance(expected, float):
        if not isinstance(given, int | float) or not isinstance(expected, int | float):
            return False
        return _close(given, expected)
    if isinstance(given, list) and isinstance(expected, list | tuple):
        pairs = zip(given, expected, strict=False)
        return len(given) == len(expected) and all(same(a, b, depth=depth + 1) for a, b in pairs)
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            same(value, expected[key], depth=depth + 1) for key, value in given.items()
        )
    return type(given) is type(expected) and given == expected


def _close(given: float, expected: float) -> bool:
    try:
        return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12 if expected == 0 else 0.0)
    except OverflowError:
        return False


def ending_badly(source: str, function: str) -> str:
    """The source, with this function made to fail at its end: the same name, calls and checks until then."""
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            end = ast.parse("raise AssertionError").body
            node.body = [ast.Try(body=node.body, handlers=[], orelse=[], finalbody=end)]
    return ast.unparse(ast.fix_missing_locations(module))


def plainly(source: str) -> str:
    """The source as `ending_badly` writes it, so that the two differ in nothing else."""
    return ast.unparse(ast.parse(source))
