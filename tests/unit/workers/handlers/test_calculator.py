from __future__ import annotations

from itertools import islice

import pytest
from pydantic import JsonValue

from common.episode import Message, ToolCall
from workers.handlers.calculator import Calculator, evaluate

HANDLER = Calculator()
PAYLOAD: dict[str, JsonValue] = {"question": "Start with 47, add 12, subtract 9.", "answer": 50}


def said(content: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


def calc(expression: str) -> ToolCall:
    return ToolCall(name="calc", arguments={"expr": expression})


def result(content: str) -> Message:
    return Message(role="tool", content=content)


FIRST = HANDLER.init(PAYLOAD).messages
SOLVED = (*FIRST, said("", calc("47 + 12")), result("59"), said("", calc("59 - 9")), result("50"))


def test_an_episode_starts_from_the_question_and_one_tool() -> None:
    prepared = HANDLER.init({**PAYLOAD, "note": "more keys are allowed"})

    assert [(message.role, message.content) for message in prepared.messages] == [("user", PAYLOAD["question"])]
    assert [tool.name for tool in prepared.tools] == ["calc"]
    assert not prepared.needs_sandbox


def test_a_payload_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="answer"):
        HANDLER.init({"question": "?"})


def test_tasks_are_the_same_for_the_same_seed_and_other_for_another() -> None:
    tasks = list(HANDLER.tasks(seed=3, num_tasks=50))

    assert tasks == list(HANDLER.tasks(seed=3, num_tasks=50))
    assert tasks[:20] == list(HANDLER.tasks(seed=3, num_tasks=20))
    assert tasks != list(HANDLER.tasks(seed=4, num_tasks=50))
    assert len({str(task["question"]) for task in tasks}) == 50


def test_answers_follow_from_the_questions_and_stay_in_two_digits() -> None:
    for task in islice(HANDLER.tasks(seed=0, num_tasks=500), 500):
        words = str(task["question"]).rstrip(".").replace(",", "").split()
        value = int(words[2])
        for verb, number in zip(words[3::2], words[4::2], strict=True):
            value += int(number) if verb == "add" else -int(number)
            assert 0 <= value <= 99
            assert int(number) >= 1
        assert value == task["answer"]


async def test_calc_gives_the_value() -> None:
    assert await HANDLER.call_tool(calc("47 + 12"), PAYLOAD, None) == "59"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall(name="shell", arguments={}), "unknown tool: shell"),
        (ToolCall(name="calc", arguments={}), "error: calc needs the text expr"),
        (ToolCall(name="calc", arguments={"expr": 3}), "error: calc needs the text expr"),
        (calc("1 +"), "error: not an expression"),
        (calc(""), "error: only numbers and + - * ( ) up to 100 characters"),
    ],
)
async def test_the_agents_mistakes_come_back_as_text(call: ToolCall, text: str) -> None:
    assert await HANDLER.call_tool(call, PAYLOAD, None) == text


@pytest.mark.parametrize(
    ("expression", "value"), [("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("3 - 5", -2), ("-5", -5), (" 7 ", 7)]
)
def test_arithmetic(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "1 / 2",
        "2 ** 9",
        "1.5",
        "0x10",
        "1_0",
        "007",
        "True",
        "2 (3)",
        "1\n2",
        "1; 2",
        "1\0",
        "٣",
        "(" * 100,
        "9" * 100,
        "99999 * 99999",
        "1" + " + 1" * 30,
        "- " * 49 + "x",
    ],
)
def test_anything_else_is_refused_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^(only|not an expression|too large)"):
        evaluate(expression)


@pytest.mark.parametrize("answer", ["answer: 50", "47 + 12 - 9 is 50", "It is 50."])
def test_the_right_number_found_with_the_tool_is_rewarded(answer: str) -> None:
    score = HANDLER.eval(PAYLOAD, (*SOLVED, said(answer)))

    assert score.reward == 1
    assert score.parts == {"answered": 1, "correct": 1, "used_tool": 1}


@pytest.mark.parametrize(
    ("transcript", "parts"),
    [
        ((*SOLVED, said("answer: 51")), {"answered": 1, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("answer: 50 or 51")), {"answered": 1, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("answer: -50")), {"answered": 1, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("answer: " + "5" * 5000)), {"answered": 1, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("done")), {"answered": 1, "correct": 0, "used_tool": 1}),
        (SOLVED, {"answered": 0, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("answer: 50", calc("1"))), {"answered": 0, "correct": 0, "used_tool": 1}),
        ((*SOLVED, said("answer: <tool_call>50")), {"answered": 0, "correct": 0, "used_tool": 1}),
        ((*FIRST, said("answer: 50")), {"answered": 1, "correct": 1, "used_tool": 0}),
        (
            (*FIRST, said("", calc("1 +")), result("error: not an expression"), said("answer: 50")),
            {"answered": 1, "correct": 1, "used_tool": 0},
        ),
        (
            (*FIRST, said("", ToolCall(name="x", arguments={})), result("unknown tool: x"), said("answer: 50")),
            {"answered": 1, "correct": 1, "used_tool": 0},
        ),
    ],
)
def test_all_else_is_not(transcript: tuple[Message, ...], parts: dict[str, float]) -> None:
    score = HANDLER.eval(PAYLOAD, transcript)

    assert score.reward == 0
    assert score.parts == parts
