from __future__ import annotations

import pytest
from pydantic import JsonValue

from benchmarks.commands_only import CommandsOnly
from common.episode import Message, ToolCall
from workers.handlers.shell import MAX_OUTPUT_CHARS, Shell
from workers.sandbox.protocol import ExecResult

HANDLER = Shell()
PAYLOAD: dict[str, JsonValue] = {
    "question": "Find the code of maple.",
    "answer": 73,
    "files": {"maple42": "code 73\n", "oak10": "code 11\n"},
}


class FixedSandbox(CommandsOnly):
    """Answers every command with the same result and keeps the commands."""

    def __init__(self, result: ExecResult) -> None:
        self.result = result
        self.commands: list[str] = []

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        self.commands.append(command)
        return self.result


def sandbox(output: str = "", exit_code: int | None = 0, num_dropped_bytes: int = 0) -> FixedSandbox:
    return FixedSandbox(
        ExecResult(exit_code=exit_code, output=output, timed_out=exit_code is None, num_dropped_bytes=num_dropped_bytes)
    )


def shell(command: object) -> ToolCall:
    return ToolCall.model_validate({"name": "shell", "arguments": {"command": command}})


def test_an_episode_starts_with_its_files_in_a_sandbox() -> None:
    prepared = HANDLER.init(PAYLOAD)

    assert prepared.needs_sandbox
    assert prepared.files == {"maple42": "code 73\n", "oak10": "code 11\n"}
    assert [tool.name for tool in prepared.tools] == ["shell"]


def test_tasks_can_be_solved_from_their_files() -> None:
    tasks = list(HANDLER.tasks(seed=0, num_tasks=100))

    assert tasks == list(HANDLER.tasks(seed=0, num_tasks=100))
    for task in tasks:
        tree = str(task["question"]).removeprefix("Find the code of ").removesuffix(".")
        files = HANDLER.init(task).files
        found = [text for name, text in files.items() if name.startswith(tree)]
        assert found == [f"code {task['answer']}\n"]
        assert len(files) == 4


async def test_the_command_runs_in_the_sandbox_and_its_output_is_the_result() -> None:
    box = sandbox("maple42\noak10\n")

    assert await HANDLER.call_tool(shell("ls"), PAYLOAD, box) == "maple42\noak10"
    assert box.commands == ["ls"]


@pytest.mark.parametrize(
    ("box", "text"),
    [
        (sandbox("no such file\n", exit_code=1), "error: exit code 1\nno such file"),
        (sandbox("half", exit_code=None), "error: timed out after 10 s\nhalf"),
        (sandbox("a\0b"), "a\ufffdb"),
        (sandbox("x" * (MAX_OUTPUT_CHARS + 1)), "x" * MAX_OUTPUT_CHARS + "\n[cut]"),
        (sandbox("x", num_dropped_bytes=1), "x\n[cut]"),
    ],
)
async def test_failures_and_odd_output_come_back_as_text(box: FixedSandbox, text: str) -> None:
    assert await HANDLER.call_tool(shell("something"), PAYLOAD, box) == text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall(name="calc", arguments={}), "unknown tool: calc"),
        (ToolCall(name="shell", arguments={}), "error: shell needs the text command"),
        (shell(3), "error: shell needs the text command"),
        (shell("  "), "error: shell needs the text command"),
    ],
)
async def test_a_wrong_call_runs_nothing(call: ToolCall, text: str) -> None:
    box = sandbox()

    assert await HANDLER.call_tool(call, PAYLOAD, box) == text
    assert box.commands == []


@pytest.mark.parametrize(("answer", "reward"), [("answer: 73", 1), ("answer: 11", 0)])
def test_the_right_code_is_rewarded(answer: str, reward: float) -> None:
    transcript = (
        *HANDLER.init(PAYLOAD).messages,
        Message(role="assistant", content="", tool_calls=(shell("cat maple42"),)),
        Message(role="tool", content="code 73"),
        Message(role="assistant", content=answer),
    )

    assert HANDLER.eval(PAYLOAD, transcript).reward == reward
