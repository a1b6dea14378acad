"""Write a function into `solution.py`. EVAL calls it in a fresh sandbox and compares what it gives: `JudgesFiles`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

from common.episode import Message, ToolCall
from workers.evaluator.cases import cases_of
from workers.evaluator.judge import Judge
from workers.evaluator.submission import FileRules
from workers.evaluator.suite import Call, InProcess, Test
from workers.handlers.base import Prepared, Score
from workers.handlers.shell import SHELL, call_shell
from workers.sandbox.protocol import SandboxSession

RULES = {
    "the sum of the numbers": sum,
    "the largest number": max,
    "the smallest number": min,
    "how many numbers there are": len,
}
NUM_CASES = 5


class Case(BaseModel):
    """One call of `solve` and what it must give."""

    model_config = ConfigDict(frozen=True)

    arguments: tuple[JsonValue, ...]
    expected: JsonValue


class Checks(BaseModel):
    """Tests in Python, for what no comparison of results can say; `InProcess`."""

    model_config = ConfigDict(frozen=True)

    source: str
    functions: tuple[str, ...]
    canary: str


class Payload(BaseModel):
    """One task of this kind; a data set may carry more keys. Raises ValueError without tests that can be passed."""

    model_config = ConfigDict(frozen=True)

    question: str
    cases: tuple[Case, ...]
    checks: Checks | None = None
    files: dict[str, str] = {}
    """What the agent finds in its sandbox: relative path -> text."""

    @model_validator(mode="after")
    def _can_be_judged(self) -> Self:
        if not self.cases and self.checks is None:
            raise ValueError("a task needs at least one test: cases, or checks with functions")
        cases_of(_tests(self))
        return self


class Coding:
    """The handler `workers.handlers.coding:Coding`."""

    name = "coding"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Payloads of small functions on lists of numbers."""
        rng = random.Random(f"coding/{seed}")
        for _ in range(num_tasks):
            words, rule = rng.choice(list(RULES.items()))
            cases: list[JsonValue] = []
            for _ in range(NUM_CASES):
                numbers: list[JsonValue] = [rng.randint(-99, 99) for _ in range(rng.randint(2, 6))]
                cases.append({"arguments": [numbers], "expected": rule(numbers)})  # type: ignore[operator]
            yield {"question": f"Write solution.py: solve(numbers) returns {words}.", "cases": cases}

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """The question, the tool `shell`, and a sandbox."""
        task = Payload.model_validate(payload)
        return Prepared(
            messages=(Message(role="user", content=task.question),),
            tools=(SHELL,),
            files=task.files,
            needs_sandbox=True,
        )

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """The command's output, cut."""
        assert sandbox is not None, "coding episodes have a sandbox"
        return await call_shell(call, sandbox)

    def submits(self, payload: dict[str, JsonValue]) -> FileRules:
        """Python files, in folders too."""
        return FileRules(wanted=("**/*.py",))

    def judge(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...], judge: Judge) -> Score:
        """1 if all tests pass, else 0."""
        report = judge.run(_tests(Payload.model_validate(payload)))
        solved = report.num_passed == len(report.results)
        return Score(reward=float(solved), parts=report.parts, tampered=report.tampered)


def _tests(task: Payload) -> list[Test]:
    tests: list[Test] = [
        Call(
            name=f"case {number}",
            module="solution",
            function="solve",
            arguments=case.arguments,
            expected=case.expected,
        )
        for number, case in enumerate(task.cases)
    ]
    if task.checks is not None:
        checks = task.checks
        tests.append(InProcess(source=checks.source, functions=checks.functions, canary=checks.canary))
    return tests
