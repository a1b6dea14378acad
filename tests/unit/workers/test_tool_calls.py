from __future__ import annotations

import pytest

from common.episode import ToolCall
from workers.tool_calls import parse_turn


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_plain_text_is_content() -> None:
    turn = parse_turn("  answer: 5\n")

    assert (turn.content, turn.tool_calls, turn.error) == ("answer: 5", (), None)


def test_calls_are_read_in_order_and_taken_out_of_the_text() -> None:
    turn = parse_turn(
        "First" + call('\n{"name": "a", "arguments": {"x": 1}}\n') + " then " + call('{"name": "b", "arguments": {}}')
    )

    assert turn.tool_calls == (ToolCall(name="a", arguments={"x": 1}), ToolCall(name="b", arguments={}))
    assert turn.content == "First then"


def test_arguments_as_text_become_an_object() -> None:
    turn = parse_turn(call('{"name": "a", "arguments": "{\\"x\\": [1, null]}"}'))

    assert turn.tool_calls == (ToolCall(name="a", arguments={"x": [1, None]}),)


def test_a_call_inside_thinking_is_only_a_thought() -> None:
    turn = parse_turn("<think>" + call('{"name": "a", "arguments": {}}') + "</think>done")

    assert turn.tool_calls == ()
    assert turn.error is None
    assert turn.content.endswith("</think>done")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "a", "arguments": {}}', "not closed"),
        ("ok</tool_call>", "without <tool_call>"),
        (call("{'name': 'a', 'arguments': {}}"), "not JSON"),
        (call("__import__('os').getcwd()"), "not JSON"),
        (call("[1]"), "not a JSON object"),
        (call('{"arguments": {}}'), 'no "name"'),
        (call('{"name": "a"}'), "arguments of 'a'"),
        (call('{"name": "a", "arguments": "x"}'), "arguments of 'a' is not JSON"),
        (call('{"name": "a", "arguments": {"x": NaN}}'), "NaN"),
        (call('{"name": "a", "arguments": {"x": 1e999}}'), "too large"),
        (call('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}"), "not JSON"),
        (call('{"name": "a", "arguments": {"x": ' + "[" * 500 + "]" * 500 + "}}"), "too deeply"),
        (call('{"name": "a", "arguments": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}"), "too deeply"),
        (call('{"name": "a", "arguments": {"x": "\\u0000"}}'), "not text"),
        (call('{"name": "a", "arguments": {"\\ud83d": 1}}'), "not text"),
    ],
)
def test_a_malformed_call_is_an_error_and_keeps_the_text(text: str, error: str) -> None:
    turn = parse_turn(text)

    assert turn.error is not None
    assert error in turn.error
    assert turn.tool_calls == ()
    assert turn.content == text


def test_one_malformed_call_voids_the_turn() -> None:
    turn = parse_turn(call('{"name": "a", "arguments": {}}') + call("{"))

    assert turn.tool_calls == ()
    assert turn.error is not None


def test_escapes_that_are_text_are_kept() -> None:
    turn = parse_turn(call('{"name": "a", "arguments": {"x": "\\ud83d\\ude00 \\\\u0000"}}'))

    assert turn.tool_calls[0].arguments == {"x": "\U0001f600 \\u0000"}


def test_content_can_be_stored() -> None:
    assert parse_turn("a\0b").content == "a\ufffdb"
