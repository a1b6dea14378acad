from __future__ import annotations

import pytest

from workers.evaluator.suite import Fault, InProcess, Report, Result, ending_badly, plainly, same


@pytest.mark.parametrize(
    ("given", "expected", "equal"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (1.001, 1.0, False),
        (True, 1, False),
        (1, True, False),
        ("1", 1, False),
        ([1, [2]], (1, [2]), True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        (None, None, True),
        (None, 0, False),
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
        (0, 6.626e-34, False),
        (6.626e-34, 6.627e-34, False),
        (6.626e-34 * (1 + 1e-12), 6.626e-34, True),
        (1.2e-16, 0.0, True),
        (1e-11, 0.0, False),
        (1e-16, 0, True),
        (1, 0, False),
    ],
)
def test_results_are_compared_as_data(given: object, expected: object, equal: bool) -> None:
    assert same(given, expected) is equal


def test_deep_results_are_not_compared_for_ever() -> None:
    deep: object = 1
    for _ in range(10_000):
        deep = [deep]
    assert same(deep, deep) is False


def test_a_canary_differs_from_its_test_only_at_the_end() -> None:
    source = "def test_a():\n    # why\n    x = 1\n    return None\ndef test_b(): pass\n"
    names: dict[str, object] = {}
    exec(ending_badly(source, "test_a"), names)
    with pytest.raises(AssertionError):
        names["test_a"]()  # type: ignore[operator]
    assert names["test_b"]() is None  # type: ignore[operator]
    assert plainly(source).splitlines()[0] == ending_badly(source, "test_a").splitlines()[0] == "def test_a():"


def test_tests_without_their_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="has no function canary, test_b"):
        InProcess(source="def test_a(): pass", functions=("test_a", "test_b"), canary="canary")


def test_a_report_of_an_agent_that_tampered_is_worth_nothing() -> None:
    results = (Result(name="a", fault=None), Result(name="b", fault=Fault.TIME))
    assert Report(results=results).fraction_passed == 0.5
    tampered = Report(results=results, passed_canaries=("canary",))
    assert (tampered.tampered, tampered.num_passed, tampered.fraction_passed) == (True, 0, 0.0)
    assert tampered.parts == {"tests": 2.0, "tests_passed": 0.0, "tests_time": 1.0}
    assert Report(results=()).fraction_passed == 0.0
