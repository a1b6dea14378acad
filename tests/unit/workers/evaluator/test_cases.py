from __future__ import annotations

import json
from typing import Any

import pytest

from workers.evaluator.cases import cases_of
from workers.evaluator.suite import Call, InProcess, Program


def deep(num: int) -> Any:
    value: Any = 1
    for _ in range(num):
        value = [value]
    return value


def call(expected: Any, *arguments: Any) -> Call:
    return Call(name="it", module="solution", function="f", arguments=arguments, expected=expected)


@pytest.mark.parametrize(
    ("test", "trouble"),
    [
        (call(deep(51)), "expected: nested more than 50 deep"),
        (call({"a": [{1: 2}]}), "expected: the key 1 is no text"),
        (call(10**4300), "expected: an integer of more than 4300 digits"),
        (call([float("nan")]), "expected: NaN equals nothing"),
        (call({1, 2}), "expected: a set does not come out of JSON"),
        (call("x" * 65_500), "expected has more than the 65336 bytes"),
        (call(1, -(10**4300)), "arguments: an integer of more than 4300 digits"),
        (call(1, {1: 2}), "arguments: the key 1 is no text"),
        (call(1, deep(501)), "arguments: nested more than 500 deep"),
        (Program(name="it", argv=("cat",), expected="x" * 65_536), "expected has not less than the 65536 bytes"),
        (Program(name="it", argv=(), expected=""), r"argv=\(\) is no command"),
        (Program(name="it", argv=("",), expected=""), ".* is no command"),
        (Program(name="it", argv=("cat", "a\0b"), expected=""), ".* is no command"),
    ],
)
def test_what_no_solution_could_pass_is_refused_with_its_name(test: Call | Program, trouble: str) -> None:
    with pytest.raises(ValueError, match=f"^test it: {trouble}"):
        cases_of([test])


def test_what_is_just_within_the_limits_is_taken() -> None:
    values = (deep(50), 10**4300 - 1, {"a": (1, 2.5, None, True)}, "x" * 65_000, float("inf"))
    tests = [Call(name=str(n), module="m", function="f", arguments=(), expected=v) for n, v in enumerate(values)]
    program = Program(name="program", argv=("cat",), expected="x" * 65_535 + "\n\n")
    assert [case.name for case in cases_of([*tests, program])] == ["0", "1", "2", "3", "4", "program"]
    assert json.loads(json.dumps(cases_of([call(1, float("inf"), (1,))])[0].given["arguments"])) == [float("inf"), [1]]


def test_nothing_to_test_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no tests"):
        cases_of([])
    with pytest.raises(ValueError, match="functions is empty: canary wrong alone tests nothing"):
        InProcess(source="def wrong(): pass", functions=(), canary="wrong")
    with pytest.raises(ValueError, match="the tests' source is no Python"):
        InProcess(source="def wrong(:", functions=("a",), canary="wrong")


@pytest.mark.parametrize(("num", "num_canaries"), [(1, 3), (2, 3), (5, 5)])
def test_each_function_has_a_canary_and_a_few_have_several(num: int, num_canaries: int) -> None:
    names = tuple(f"test_{number}" for number in range(num))
    source = "".join(f"def {name}(): pass\n" for name in (*names, "wrong"))
    cases = cases_of([InProcess(source=source, functions=names, canary="wrong")])
    assert [case.name for case in cases if not case.is_canary] == list(names)
    own, *made = [case for case in cases if case.is_canary]
    assert (own.given["function"], len(made)) == ("wrong", num_canaries)
    assert {case.given["function"] for case in made} == set(names)
    assert all("raise AssertionError" in str(case.given["source"]) for case in made)
