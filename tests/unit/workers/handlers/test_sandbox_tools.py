from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.episode import Message, ToolCall
from workers.handlers.registry import load_handler
from workers.handlers.sandbox_tools import TOOLS, call_sandbox_tool
from workers.handlers.workbench import Workbench
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import SandboxSession
from workers.sandbox.restricted import Restricted

HANDLER = Workbench()
PAYLOAD = next(HANDLER.tasks(seed=1, num_tasks=1))


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[SandboxSession]:
    """With the files of one task; the commands are our own."""
    backend = FolderBackend(SandboxFolders.below(tmp_path), Restricted())
    backend.create("7-1", HANDLER.init(PAYLOAD).files)
    session = backend.attach("7-1")
    yield session
    await session.close()
    backend.destroy("7-1")


def call(tool: str, **arguments: object) -> ToolCall:
    return ToolCall.model_validate({"name": tool, "arguments": arguments})


async def test_an_agent_mends_the_program_with_the_tools(sandbox: SandboxSession) -> None:
    async def said(tool: str, **arguments: object) -> str:
        return await HANDLER.call_tool(call(tool, **arguments), PAYLOAD, sandbox)

    assert (await said("shell", command="python3 <total.py")).startswith("error: exit code 1\nTraceback")
    assert await said("view_file", path="total.py", first_line=5) == (
        "     5\tprint(sum(row[1] for row in rows))\n[lines 5 to 5 of 5]"
    )
    await said("replace_in_file", path="total.py", old="row[1] for row in rows", new="int(row[1]) for row in rows[1:]")
    assert await said("python", code="import subprocess") == ""
    total = await said("python", code="int(subprocess.check_output('python3', stdin=open('total.py')))")
    assert total == str(PAYLOAD["answer"])
    transcript = (Message(role="tool", content=total), Message(role="assistant", content=f"answer: {total}"))
    assert HANDLER.eval(PAYLOAD, transcript).reward == 1
    assert isinstance(load_handler("workers.handlers.workbench:Workbench"), Workbench)


async def test_what_goes_wrong_comes_back_as_text(sandbox: SandboxSession) -> None:
    async def said(tool: str, **arguments: object) -> str:
        return await call_sandbox_tool(call(tool, **arguments), sandbox)

    assert await said("view_file", path="gone") == "error: gone: no such file or directory"
    assert (await said("python", code="1/0")).startswith("error: Traceback (most recent call last):\n")
    lost = "error: exit code 3\n\n[Python has ended: all names are lost]"
    assert await said("python", code="import os; os._exit(3)") == lost
    assert await said("python", code="2") == (
        "2\n[Python had ended before this call and was started anew: all earlier names are lost]"
    )
    assert await said("python", code="2") == "2"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (call("calc"), "unknown tool: calc"),
        (call("python"), "error: python: code: field required"),
        (call("view_file", path=3), "error: view_file: path: input should be a valid string"),
        (call("view_file", path="x", first_line=0), "error: view_file: first_line: input should be greater than .* 1"),
        (call("write_file", path="x"), "error: write_file: text: field required"),
        (call("shell", command="ls", more=1), "error: shell: more: extra inputs are not permitted"),
    ],
)
async def test_a_wrong_call_is_explained(sandbox: SandboxSession, given: ToolCall, text: str) -> None:
    assert re.fullmatch(text, await call_sandbox_tool(given, sandbox))


def test_every_tool_says_what_it_needs() -> None:
    needed = {tool.name: tool.parameters["required"] for tool in TOOLS}
    assert needed == {
        "shell": ["command"],
        "python": ["code"],
        "view_file": ["path"],
        "write_file": ["path", "text"],
        "replace_in_file": ["path", "old", "new"],
    }
