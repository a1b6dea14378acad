from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.episode import Message
from workers.evaluator.submission import Submission
from workers.evaluator.suite import Call, Fault, InProcess, Report, Result, Test
from workers.handlers.base import JudgesFiles
from workers.handlers.coding import NUM_CASES, Coding
from workers.handlers.registry import load_handler

HANDLER = Coding()
CHECKS = {"source": "def test_a(): pass\ndef canary(): pass\n", "functions": ["test_a"], "canary": "canary"}
SAID = (Message(role="user", content="Write it."), Message(role="assistant", content="Done."))


@dataclass
class Answering:
    """A judge that gives the report it was given."""

    report: Report
    submission: Submission = field(default_factory=lambda: Submission(files={}))
    asked: list[Test] = field(default_factory=list)

    def run(self, tests: Sequence[Test], *, files: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> Report:
        self.asked += tests
        return self.report


def test_it_judges_files_and_needs_no_eval() -> None:
    handler = load_handler("workers.handlers.coding:Coding")
    assert isinstance(handler, JudgesFiles)
    assert not hasattr(handler, "eval")


def test_tasks_have_the_answers_that_their_words_ask_for() -> None:
    (task,) = [task for task in HANDLER.tasks(seed=0, num_tasks=20) if "largest" in str(task["question"])][:1]
    cases: Any = task["cases"]
    for case in cases:
        (numbers,) = case["arguments"]
        assert case["expected"] == max(numbers)
    assert len(cases) == NUM_CASES
    assert list(HANDLER.tasks(seed=3, num_tasks=4)) == list(HANDLER.tasks(seed=3, num_tasks=4))


@pytest.mark.parametrize(
    ("given", "trouble"),
    [
        ({"cases": []}, "a task needs at least one test"),
        ({"cases": [], "checks": {**CHECKS, "functions": []}}, "functions is empty"),
        ({"cases": [{"arguments": [1], "expected": "x" * 70_000}]}, "test case 0: expected has more than"),
    ],
)
def test_a_task_that_tests_nothing_is_refused_before_an_agent_plays_it(given: dict[str, Any], trouble: str) -> None:
    with pytest.raises(ValueError, match=trouble):
        HANDLER.init({"question": "Write it.", **given})


def test_cases_are_compared_outside_and_checks_have_their_canary() -> None:
    (payload,) = HANDLER.tasks(seed=1, num_tasks=1)
    judge = Answering(Report(results=(Result(name="case 0", fault=None),)))
    score = HANDLER.judge({**payload, "checks": CHECKS}, SAID, judge)  # type: ignore[dict-item]
    assert (score.reward, score.parts, score.tampered) == (1.0, {"tests": 1.0, "tests_passed": 1.0}, False)
    *calls, checks = judge.asked
    assert [type(call) for call in calls] == [Call] * NUM_CASES
    assert isinstance(checks, InProcess)
    assert checks.canary == "canary"


def test_one_test_that_fails_or_a_canary_that_passes_costs_the_reward() -> None:
    (payload,) = HANDLER.tasks(seed=1, num_tasks=1)
    right, wrong = Result(name="a", fault=None), Result(name="b", fault=Fault.WRONG)
    assert HANDLER.judge(payload, SAID, Answering(Report(results=(right, wrong)))).reward == 0.0
    tampered = Answering(Report(results=(right,), passed_canaries=("canary",)))
    score = HANDLER.judge(payload, SAID, tampered)
    assert (score.reward, score.tampered) == (0.0, True)
