"""Look something up with a shell: list the files, read the right one, answer with its code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue

from common.episode import Message, ToolCall, ToolSpec
from workers.handlers.answers import score_answer
from workers.handlers.base import Prepared, Score, tool_error, unknown_tool
from workers.sandbox.protocol import ExecResult, Limit, SandboxSession

SHELL = ToolSpec(
    name="shell",
    description="Run a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
TREES = ("maple", "cedar", "birch", "oak", "pine", "elm", "willow", "aspen")
NUM_FILES = 4
COMMAND_TIMEOUT_S = 10.0
MAX_OUTPUT_CHARS = 2000
LIMITS_MET = {
    Limit.OUTPUT: "stopped: it wrote too much",
    Limit.MEMORY: "stopped: it used more memory than there is for it",
    Limit.CPU: "stopped: it used more processor time than there is for it",
    Limit.PROCESSES: "there were as many processes as there may be",
    Limit.DISK: "the disk is full",
}
"""What the policy is told; a time-out is told with its length."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A folder of files and the one that is asked for."""

    files: dict[str, int]
    """File name, a tree and a number -> code in 10..99."""
    wanted: str
    """The wanted file's name."""

    @property
    def tree(self) -> str:
        """The wanted name without its number."""
        return self.wanted.rstrip("0123456789")

    @property
    def question(self) -> str:
        """The task in words."""
        return f"Find the code of {self.tree}."

    @property
    def listing(self) -> str:
        """What `ls` prints."""
        return "\n".join(sorted(self.files))


class Payload(BaseModel):
    """One task of this kind; a data set may carry more keys."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: int
    files: dict[str, str]
    """Relative path -> text."""


class Shell:
    """The handler `shell`."""

    name = "shell"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Payloads of random searches."""
        rng = random.Random(f"shell/{seed}")
        for _ in range(num_tasks):
            search = draw_search(rng)
            files: dict[str, JsonValue] = {name: file_text(code) for name, code in search.files.items()}
            yield {"question": search.question, "answer": search.files[search.wanted], "files": files}

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """The question, the tool `shell`, and a sandbox with the files."""
        task = Payload.model_validate(payload)
        return Prepared(
            messages=(Message(role="user", content=task.question),),
            tools=(SHELL,),
            files=task.files,
            needs_sandbox=True,
        )

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """The command's output, cut to MAX_OUTPUT_CHARS."""
        assert sandbox is not None, "shell episodes have a sandbox"
        return await call_shell(call, sandbox)

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        """1 for the right code found with the tool, else 0."""
        return score_answer(transcript, Payload.model_validate(payload).answer)


def draw_search(rng: random.Random) -> Search:
    """NUM_FILES files of different trees, one of them wanted."""
    names = [f"{tree}{rng.randint(10, 99)}" for tree in rng.sample(TREES, NUM_FILES)]
    return Search(files={name: rng.randint(10, 99) for name in names}, wanted=rng.choice(names))


def file_text(code: int) -> str:
    """What a file of the search holds."""
    return f"code {code}\n"


async def call_shell(call: ToolCall, sandbox: SandboxSession) -> str:
    """The result of a call of SHELL, for handlers that offer it alone. Raises EpisodeError when the sandbox failed."""
    if call.name != SHELL.name:
        return unknown_tool(call)
    command = call.arguments.get("command")
    if not isinstance(command, str) or not command.strip():
        return tool_error("shell needs the text command")
    return show(await sandbox.exec(command, timeout_s=COMMAND_TIMEOUT_S))


def show(result: ExecResult) -> str:
    """A command's result as the policy reads it. NUL, which no database text can hold, becomes U+FFFD."""
    output = result.output.replace("\0", "\ufffd").removesuffix("\n")
    if result.truncated or len(output) > MAX_OUTPUT_CHARS:
        output = f"{output[:MAX_OUTPUT_CHARS]}\n[cut]"
    if result.timed_out:
        return tool_error(f"timed out after {COMMAND_TIMEOUT_S:g} s\n{output}")
    if result.limit is not None:
        return tool_error(f"{LIMITS_MET[result.limit]} (exit code {result.exit_code})\n{output}")
    if result.exit_code != 0:
        return tool_error(f"exit code {result.exit_code}\n{output}")
    return output
