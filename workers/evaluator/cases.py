"""The processes of an evaluation: one for each test, and the canaries. What can't pass is refused: the handler's error.

`workers.evaluator.judge` runs them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.evaluator.suite import (
    MAX_DEPTH,
    MAX_INPUT_BYTES,
    Call,
    InProcess,
    Program,
    Test,
    ending_badly,
    plainly,
)
from workers.sandbox.protocol import Limits

MAX_ARGUMENT_DEPTH = 500
"""The sandbox's own Python reads them."""
MAX_DIGITS = 4300
"""Of an integer: more than that no Python reads as JSON."""
MIN_CANARIES = 3
"""Of an InProcess test's own functions: one each, but of a few functions several, for lies that are told at random."""
RUNNER_BYTES = 200
"""What the runner says beside the value, at most."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process of a test."""

    name: str
    given: Mapping[str, object]
    """What the runner is told; {} = it is a Program."""
    test: Call | Program | InProcess
    is_canary: bool = False


def cases_of(tests: Sequence[Test], limits: Limits | None = None) -> list[Case]:
    """The processes of the tests and their canaries. Raises ValueError for tests that no solution can pass.

    Handlers call it in `init`, to refuse a task before an agent has spent its time on it.
    """
    if not tests:
        raise ValueError("there are no tests: files that nothing tests have no score")
    kept_bytes = (limits or Limits()).kept_bytes
    cases: list[Case] = []
    for test in tests:
        match test:
            case Program():
                _check_program(test, kept_bytes)
                cases.append(Case(name=test.name, given={}, test=test))
            case Call():
                _check_call(test, kept_bytes)
                told = {"module": test.module, "function": test.function, "arguments": list(test.arguments)}
                cases.append(Case(name=test.name, given=told, test=test))
            case InProcess():
                cases += _in_process(test)
    for found in cases:
        told_text = found.test.input if isinstance(found.test, Program) else json.dumps(found.given)
        if len(told_text.encode()) > MAX_INPUT_BYTES:
            raise ValueError(f"test {found.name}: more than {MAX_INPUT_BYTES} bytes; put them into a file of the tests")
    if len({found.name for found in cases}) < len(cases):
        raise ValueError(f"two tests have the same name: {sorted(found.name for found in cases)}")
    return cases


def _in_process(test: InProcess) -> list[Case]:
    source = plainly(test.source)
    cases = [
        Case(name=function, given={"source": source, "function": function}, test=test) for function in test.functions
    ]
    told = {"source": source, "function": test.canary}
    cases.append(Case(name=f"canary {test.canary}", given=told, test=test, is_canary=True))
    # To the code under test it is one of the tests, until that test is over.
    for number in range(max(len(test.functions), MIN_CANARIES)):
        function = test.functions[number % len(test.functions)]
        told = {"source": ending_badly(test.source, function), "function": function}
        cases.append(Case(name=f"canary {number} of {function}", given=told, test=test, is_canary=True))
    return cases


def _check_program(test: Program, kept_bytes: int) -> None:
    if not test.argv or not test.argv[0] or any("\0" in word for word in test.argv):
        raise ValueError(f"test {test.name}: argv={test.argv!r:.200} is no command")
    if len(test.expected.rstrip().encode()) >= kept_bytes:  # and the end of the line
        raise ValueError(
            f"test {test.name}: expected has not less than the {kept_bytes} bytes that are kept of what a "
            "program prints; let it print less, such as a digest"
        )


def _check_call(test: Call, kept_bytes: int) -> None:
    given, expected = _trouble(test.arguments, MAX_ARGUMENT_DEPTH), _trouble(test.expected, MAX_DEPTH, is_compared=True)
    if given is not None:
        raise ValueError(f"test {test.name}: arguments: {given}")
    if expected is not None:
        raise ValueError(f"test {test.name}: expected: {expected}")
    if len(json.dumps(test.expected)) > kept_bytes - RUNNER_BYTES:
        raise ValueError(
            f"test {test.name}: expected has more than the {kept_bytes - RUNNER_BYTES} bytes that are kept of a result"
        )


def _trouble(value: object, most: int, *, is_compared: bool = False) -> str | None:
    """Why the value, or one in it, would come out of JSON as another; None = it would not."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        if depth > most:
            return f"nested more than {most} deep"
        if isinstance(value, dict):
            if wrong := [key for key in value if type(key) is not str]:
                return f"the key {wrong[0]!r:.80} is no text, as all keys of JSON are"
            left += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            left += [(item, depth + 1) for item in value]
        elif (trouble := _trouble_of_one(value, is_compared=is_compared)) is not None:
            return trouble
    return None


def _trouble_of_one(value: object, *, is_compared: bool) -> str | None:
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        return f"an integer of more than {MAX_DIGITS} digits"
    if is_compared and isinstance(value, float) and math.isnan(value):
        return "NaN equals nothing, not even itself"
    is_plain = value is None or isinstance(value, bool | float) or type(value) in (int, str)
    if is_plain or (isinstance(value, int | str) and not is_compared):
        return None
    return f"a {type(value).__name__} does not come out of JSON as what it was"
