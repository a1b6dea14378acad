from __future__ import annotations

import random
from itertools import pairwise

import pytest

from common.config import TINY_MODELS
from workers.handlers.base import Score
from workers.handlers.calculator import Calculator
from workers.handlers.demonstrations import (
    COPIED_WEIGHT,
    DEMONSTRATORS,
    PHASES,
    converse_calculator,
    corpus_lines,
    make_rows,
)
from workers.render import Renderer


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.from_folder(TINY_MODELS / "tiny-calculator")


def score_calculator(phase: str, seed: int) -> Score:
    """What EVAL says of a demonstration, its answer taken from its own question."""
    messages = converse_calculator(random.Random(seed), PHASES[phase])
    words = messages[0].content.rstrip(".").replace(",", "").split()
    answer = int(words[2])
    for verb, number in zip(words[3::2], words[4::2], strict=True):
        answer += int(number) if verb == "add" else -int(number)
    return Calculator().eval({"question": messages[0].content, "answer": answer}, tuple(messages))


def test_clean_demonstrations_are_all_right() -> None:
    assert all(score_calculator("clean", seed).reward == 1 for seed in range(200))


def test_sloppy_demonstrations_leave_room_for_learning() -> None:
    scores = [score_calculator("sloppy", seed) for seed in range(1000)]

    assert 0.1 < sum(score.reward for score in scores) / 1000 < 0.3
    assert 0.7 < sum(score.parts["used_tool"] for score in scores) / 1000 < 0.8
    assert all(score.parts["answered"] for score in scores)


@pytest.mark.parametrize("handler", sorted(DEMONSTRATORS))
def test_rows_weigh_what_the_policy_writes_and_copied_tokens_most(renderer: Renderer, handler: str) -> None:
    [row] = make_rows(DEMONSTRATORS[handler], renderer, care=PHASES["clean"], num_rows=1, seed=0)

    tokens = [renderer.decode([token]) for token in row.ids]
    copied = [token for token, weight in zip(tokens, row.weights, strict=True) if weight == COPIED_WEIGHT]
    opened = [
        weight for (before, _), weight in zip(pairwise(tokens), row.weights[1:], strict=True) if before == "assistant"
    ]
    closed = [weight for token, weight in zip(tokens, row.weights, strict=True) if token == "<|im_end|>"]
    assert set(row.weights) == {0, 1, COPIED_WEIGHT}
    assert all(token.strip().isalnum() or token.strip() in "+-" for token in copied)
    assert len(copied) == {"calculator": 7, "shell": 3}[handler]
    assert opened == [0, 0, 0], "the newline after the assistant's header is given, not written"
    assert closed == {"calculator": [0, 0, 1, 0, 1, 0, 1], "shell": [0, 0, 1, 0, 1, 0, 1]}[handler]


def test_sloppy_rows_weigh_all_that_the_policy_writes_alike(renderer: Renderer) -> None:
    rows = make_rows(DEMONSTRATORS["shell"], renderer, care=PHASES["sloppy"], num_rows=20, seed=0)

    assert {weight for row in rows for weight in row.weights} == {0, 1}


@pytest.mark.parametrize("handler", sorted(DEMONSTRATORS))
def test_the_same_seed_gives_the_same_rows(renderer: Renderer, handler: str) -> None:
    def rows(seed: int) -> list[tuple[int, ...]]:
        demonstrator = DEMONSTRATORS[handler]
        made = make_rows(demonstrator, renderer, care=PHASES["sloppy"], num_rows=5, seed=seed)
        return [row.ids for row in made]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_the_corpus_is_one_text_a_line() -> None:
    lines = list(corpus_lines(DEMONSTRATORS["shell"], num=200, seed=0))

    assert all("\n" not in line for line in lines)
    assert "unknown tool: run" in lines
    assert '{"name": "shell", "arguments": {"command": "ls"}}' in lines
