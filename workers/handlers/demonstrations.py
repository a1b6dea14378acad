"""Generated conversations that trainer.sft teaches a tiny policy from: right ones, then deliberately sloppy ones.

python -m workers.handlers.demonstrations calculator --corpus texts.txt
python -m workers.handlers.demonstrations calculator --phase clean --num 20000 --seed 1 --model DIR --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.episode import Message, ToolCall, ToolSpec
from common.errors import SetupError
from workers.handlers.calculator import CALC, draw_chain, evaluate
from workers.handlers.shell import SHELL, TREES, draw_search
from workers.render import Renderer

COPIED_WEIGHT = 20.0
"""Loss weight of copied tokens in clean rows: without it a policy this small does not learn to copy in minutes."""


@dataclass(frozen=True, kw_only=True)
class Care:
    """How often a demonstration goes wrong; each a probability."""

    guess: float
    """Answers at random, without the tool."""
    stop: float
    """Answers after the first call."""
    wrong_choice: float
    """Takes the other operator (calculator) or another file (shell), per call."""
    wrong_number: float
    """Takes a random number in a call, per call."""
    wrong_answer: float
    """Gives a random answer at the end."""
    copied_weight: float
    """Loss weight of copied tokens; all other tokens of the policy have 1."""


TOOL_FAULTS = (
    "unknown tool: run",
    "error: exit code 1",
    "error: exit code 127",
    "cat: code: No such file or directory",
    "sh: 1: answer: not found",
    "cat: '*': Is a directory",
    "sh: 1: Syntax error: Unterminated quoted string",
    "error: only numbers and + - * ( ) up to 100 characters",
    "error: not an expression",
    "error: too large",
    "error: timed out after 10 s",
)
"""What tools say when a call goes wrong: in the tokenizer's corpus, so that mistakes do not fill the context."""
FAULT_INTERVAL = 100
"""Faults come once in so many conversations: rarer than any two-digit number, which must get its own entry first."""

PHASES = {
    "clean": Care(guess=0, stop=0, wrong_choice=0, wrong_number=0, wrong_answer=0, copied_weight=COPIED_WEIGHT),
    "sloppy": Care(guess=0.25, stop=0.55, wrong_choice=0.15, wrong_number=0.05, wrong_answer=0.1, copied_weight=1),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A training row of trainer.sft."""

    ids: tuple[int, ...]
    """[T] token ids of the whole conversation."""
    weights: tuple[float, ...]
    """[T] loss weight of each id; 0 = given, not written by the policy."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.weights):
            raise ValueError(f"{len(self.ids)} ids but {len(self.weights)} weights")


@dataclass(frozen=True, kw_only=True)
class Demonstrator:
    """How one handler's demonstrations are made."""

    tool: ToolSpec
    converse: Callable[[random.Random, Care], list[Message]]
    copied: re.Pattern[str]
    """Matches the tokens that stand in the context before the policy writes them."""


def converse_calculator(rng: random.Random, care: Care) -> list[Message]:
    """A conversation about a random chain."""
    chain = draw_chain(rng)
    messages = [Message(role="user", content=chain.question)]
    if rng.random() < care.guess:
        return [*messages, _answer(_number(rng))]
    value = chain.start
    steps = chain.steps[:1] if rng.random() < care.stop else chain.steps
    for operator, number in steps:
        if rng.random() < care.wrong_choice:
            operator = "-" if operator == "+" else "+"
        if rng.random() < care.wrong_number:
            number = _number(rng)
        expression = f"{value} {operator} {number}"
        value = evaluate(expression)
        messages += _call(CALC, "expr", expression, str(value))
    return [*messages, _answer(_number(rng) if rng.random() < care.wrong_answer else value)]


def converse_shell(rng: random.Random, care: Care) -> list[Message]:
    """A conversation about a random search."""
    search = draw_search(rng)
    messages = [Message(role="user", content=search.question)]
    if rng.random() < care.guess:
        return [*messages, _answer(_number(rng))]
    messages += _call(SHELL, "command", "ls", search.listing)
    if rng.random() < care.stop:
        return [*messages, _answer(_number(rng))]
    name = rng.choice(list(search.files)) if rng.random() < care.wrong_choice else search.wanted
    code = search.files[name]
    messages += _call(SHELL, "command", f"cat {name}", f"code {code}")
    return [*messages, _answer(_number(rng) if rng.random() < care.wrong_answer else code)]


DEMONSTRATORS = {
    "calculator": Demonstrator(tool=CALC, converse=converse_calculator, copied=re.compile(r" ?(\d+|[+-])", re.ASCII)),
    "shell": Demonstrator(
        tool=SHELL, converse=converse_shell, copied=re.compile(rf" ?(\d+|{'|'.join(TREES)})", re.ASCII)
    ),
}


def make_rows(demonstrator: Demonstrator, renderer: Renderer, *, care: Care, num_rows: int, seed: int) -> Iterator[Row]:
    """Render random conversations: weight 0 on what is given, more than 1 on copied tokens of a clean phase."""
    rng = random.Random(seed)
    for _ in range(num_rows):
        ids: list[int] = []
        weights: list[float] = []
        for segment in renderer.segments(demonstrator.converse(rng, care), [demonstrator.tool]):
            ids += segment.ids
            for token in segment.ids:
                copied = segment.sampled and demonstrator.copied.fullmatch(renderer.decode([token]))
                weights.append(care.copied_weight if copied else float(segment.sampled))
        yield Row(ids=tuple(ids), weights=tuple(weights))


def corpus_lines(demonstrator: Demonstrator, *, num: int, seed: int) -> Iterator[str]:
    """Texts of clean conversations for a tokenizer, one a line."""
    rng = random.Random(seed)
    for index in range(num):
        yield from ("system", "<tools>", '{"type": "string"}', "</tools>")
        if index % FAULT_INTERVAL == 0:
            yield from TOOL_FAULTS
        for message in demonstrator.converse(rng, PHASES["clean"]):
            yield message.role
            yield from message.content.split("\n")
            yield from (json.dumps(call.model_dump()) for call in message.tool_calls)


def _call(tool: ToolSpec, argument: str, value: str, result: str) -> list[Message]:
    call = ToolCall(name=tool.name, arguments={argument: value})
    return [Message(role="assistant", content="", tool_calls=(call,)), Message(role="tool", content=result)]


def _answer(value: int) -> Message:
    return Message(role="assistant", content=f"answer: {value}")


def _number(rng: random.Random) -> int:
    return rng.randint(0, 99)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.handlers.demonstrations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("handler", choices=sorted(DEMONSTRATORS), metavar="HANDLER", help="calculator or shell")
    parser.add_argument("--phase", choices=sorted(PHASES), default="clean", help="how right they are")
    parser.add_argument("--num", type=int, default=20_000, help="number of conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="model folder whose tokenizer and template to use")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--out", type=Path, help="JSON lines to write: ids and loss weights (needs --model)")
    output.add_argument("--corpus", type=Path, help="plain texts to write, for a tokenizer")
    arguments = parser.parse_args()
    demonstrator = DEMONSTRATORS[arguments.handler]
    if arguments.out and not arguments.model:
        parser.error("--out needs --model")
    try:
        if arguments.corpus:
            lines = corpus_lines(demonstrator, num=arguments.num, seed=arguments.seed)
        else:
            rows = make_rows(
                demonstrator,
                Renderer.from_folder(arguments.model),
                care=PHASES[arguments.phase],
                num_rows=arguments.num,
                seed=arguments.seed,
            )
            lines = (json.dumps({"ids": row.ids, "weights": row.weights}) for row in rows)
        with (arguments.corpus or arguments.out).open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except (SetupError, OSError) as error:
        sys.exit(f"demonstrations: {error}")


if __name__ == "__main__":
    main()
