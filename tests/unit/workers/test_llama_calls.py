from __future__ import annotations

import pytest

from common.episode import ToolCall
from workers.llama_calls import parse_llama_turn

LOOK = '{"name": "look", "parameters": {"at": "left"}}'
CALL = ToolCall(name="look", arguments={"at": "left"})


@pytest.mark.parametrize(
    "text",
    [
        LOOK,
        f"\n{LOOK}\n",
        f"<|python_tag|>{LOOK}",
        LOOK.replace("parameters", "arguments"),
        '{"type": "function", "name": "look", "parameters": "{\\"at\\": \\"left\\"}"}',
    ],
)
def test_a_turn_that_is_an_object_with_a_name_is_a_call(text: str) -> None:
    turn = parse_llama_turn(text)

    assert (turn.content, turn.tool_calls, turn.error) == ("", (CALL,), None)


@pytest.mark.parametrize("text", [f"{LOOK};{LOOK}", f"{LOOK}\n{LOOK}", f"<|python_tag|>{LOOK}; {LOOK}"])
def test_several_calls_stand_behind_each_other(text: str) -> None:
    assert parse_llama_turn(text).tool_calls == (CALL, CALL)


def test_text_before_the_tag_is_content() -> None:
    turn = parse_llama_turn(f"Let me see. <|python_tag|>{LOOK}")

    assert (turn.content, turn.tool_calls) == ("Let me see.", (CALL,))


@pytest.mark.parametrize("text", ["answer: 5", '{"answer": 5}', "{not json}", f"It is {LOOK}."])
def test_other_text_is_content(text: str) -> None:
    turn = parse_llama_turn(text)

    assert (turn.content, turn.tool_calls, turn.error) == (text, (), None)


def test_a_call_inside_thinking_is_only_a_thought() -> None:
    turn = parse_llama_turn(f"<think><|python_tag|>{LOOK}</think>done")

    assert turn.tool_calls == ()
    assert turn.error is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "look", "parameters": {"at": "left"}', "not JSON"),
        (f"{LOOK} and so on", "not JSON"),
        ("<|python_tag|>look.call(at='left')", "not JSON"),
        ("<|python_tag|>", "nothing follows"),
        ('<|python_tag|>{"parameters": {}}', 'no "name"'),
        ('{"name": "look"}', "arguments of 'look'"),
        ("<|python_tag|>[1]", "not a JSON object"),
        ('{"name": "look", "parameters": {"at": NaN}}', "NaN"),
        ('{"name": "look", "parameters": {"at": 1e999}}', "too large"),
        ('{"name": "look", "parameters": {"at": "\\u0000"}}', "not text"),
        ('{"name": "look", "parameters": ' + "[" * 100_000, "too deeply"),
    ],
)
def test_a_malformed_call_is_an_error_and_keeps_the_text(text: str, error: str) -> None:
    turn = parse_llama_turn(text)

    assert turn.error is not None
    assert error in turn.error
    assert turn.tool_calls == ()
    assert turn.content == text
