"""Chained arithmetic: each step is one call of `calc` whose result the next call needs."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from pydantic import BaseModel, ConfigDict, JsonValue

from common.episode import Message, ToolCall, ToolSpec
from workers.handlers.answers import score_answer
from workers.handlers.base import Prepared, Score, tool_error, unknown_tool
from workers.sandbox.protocol import SandboxSession

CALC = ToolSpec(
    name="calc",
    description="Evaluate + - * of whole numbers.",
    parameters={"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]},
)
EXPRESSION = re.compile(r"[0-9+\-*() ]{1,100}", re.ASCII)
"""Bounds what Python's parser sees: its depth, its time and the numbers' size."""
LARGEST = 10**9
NUM_STEPS = 2
VERBS = {"+": "add", "-": "subtract"}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A start value and steps on it; every value stays in 0..99."""

    start: int
    steps: tuple[tuple[str, int], ...]
    """(operator "+" or "-", number)."""

    @property
    def values(self) -> tuple[int, ...]:
        """The start value and the value after each step."""
        return tuple(accumulate((n if op == "+" else -n for op, n in self.steps), initial=self.start))

    @property
    def question(self) -> str:
        """The task in words."""
        steps = "".join(f", {VERBS[op]} {number}" for op, number in self.steps)
        return f"Start with {self.start}{steps}."


class Payload(BaseModel):
    """One task of this kind; a data set may carry more keys."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: int


class Calculator:
    """The handler `calculator`."""

    name = "calculator"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Payloads of random chains."""
        rng = random.Random(f"calculator/{seed}")
        for _ in range(num_tasks):
            chain = draw_chain(rng)
            yield {"question": chain.question, "answer": chain.values[-1]}

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """The question and the tool `calc`; no sandbox."""
        question = Payload.model_validate(payload).question
        return Prepared(messages=(Message(role="user", content=question),), tools=(CALC,))

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """The value of the expression."""
        if call.name != CALC.name:
            return unknown_tool(call)
        expression = call.arguments.get("expr")
        if not isinstance(expression, str):
            return tool_error("calc needs the text expr")
        try:
            return str(evaluate(expression))
        except ValueError as error:
            return tool_error(str(error))

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        """1 for the right number found with the tool, else 0."""
        return score_answer(transcript, Payload.model_validate(payload).answer)


def draw_chain(rng: random.Random) -> Chain:
    """A random chain of NUM_STEPS steps."""
    start = rng.randint(0, 99)
    value, steps = start, []
    for _ in range(NUM_STEPS):
        operator = rng.choice("+-") if 0 < value < 99 else "+" if value == 0 else "-"
        number = rng.randint(1, 99 - value if operator == "+" else value)
        value += number if operator == "+" else -number
        steps.append((operator, number))
    return Chain(start=start, steps=tuple(steps))


def evaluate(expression: str) -> int:
    """The value of + - * over whole numbers, never by `eval`. Raises ValueError, in words for the agent."""
    if not EXPRESSION.fullmatch(expression):
        raise ValueError("only numbers and + - * ( ) up to 100 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("not an expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            result = _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            result = _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            result = _value(left) * _value(right)
        case _:
            raise ValueError("only + - *")
    if abs(result) > LARGEST:
        raise ValueError("too large")
    return result
