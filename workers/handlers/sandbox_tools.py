"""Tools for handlers whose agents work in a sandbox: the shell, Python that keeps its names, and files.

A handler offers TOOLS, or some of them, and passes calls on to `call_sandbox_tool`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from common.episode import ToolCall, ToolSpec
from workers.handlers.base import tool_error, unknown_tool
from workers.handlers.shell import COMMAND_TIMEOUT_S, SHELL, show
from workers.sandbox.file_requests import FileRequest, ReplaceInFile, ViewFile, WriteFile
from workers.sandbox.protocol import ExecResult, Interpreter, SandboxSession

TEXT: JsonValue = {"type": "string"}
LINE: JsonValue = {"type": "integer", "minimum": 1}


def _tool(name: str, description: str, optional: dict[str, JsonValue] | None = None, **needed: JsonValue) -> ToolSpec:
    parameters: dict[str, JsonValue] = {
        "type": "object",
        "properties": {**needed, **(optional or {})},
        "required": list(needed),
    }
    return ToolSpec(name=name, description=description, parameters=parameters)


PYTHON = _tool("python", "Run Python code. Names are kept from call to call. The last value is shown.", code=TEXT)
VIEW_FILE = _tool(
    "view_file",
    "Show a text file with numbered lines, or a folder.",
    {"first_line": LINE, "last_line": LINE},
    path=TEXT,
)
WRITE_FILE = _tool("write_file", "Write a whole file, new or in place of another.", path=TEXT, text=TEXT)
REPLACE_IN_FILE = _tool(
    "replace_in_file", "Replace a text that stands exactly once in a file.", path=TEXT, old=TEXT, new=TEXT
)
TOOLS = (SHELL, PYTHON, VIEW_FILE, WRITE_FILE, REPLACE_IN_FILE)
STATES = {
    Interpreter.ENDED: "[Python has ended: all names are lost]",
    Interpreter.RESTARTED: "[Python had ended before this call and was started anew: all earlier names are lost]",
}


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Shell(_Arguments):
    command: str


class _Python(_Arguments):
    code: str


class _View(_Arguments):
    path: str
    first_line: int | None = Field(default=None, ge=1)
    last_line: int | None = Field(default=None, ge=1)

    def request(self) -> FileRequest:
        return ViewFile(path=self.path, first_line=self.first_line, last_line=self.last_line)


class _Write(_Arguments):
    path: str
    text: str

    def request(self) -> FileRequest:
        return WriteFile(path=self.path, text=self.text)


class _Replace(_Arguments):
    path: str
    old: str
    new: str

    def request(self) -> FileRequest:
        return ReplaceInFile(path=self.path, old=self.old, new=self.new)


_ARGUMENTS: dict[str, type[_Shell | _Python | _View | _Write | _Replace]] = {
    SHELL.name: _Shell,
    PYTHON.name: _Python,
    VIEW_FILE.name: _View,
    WRITE_FILE.name: _Write,
    REPLACE_IN_FILE.name: _Replace,
}


async def call_sandbox_tool(call: ToolCall, sandbox: SandboxSession) -> str:
    """The result of a call of one of TOOLS, as the policy reads it. Raises EpisodeError when the sandbox failed."""
    if call.name not in _ARGUMENTS:
        return unknown_tool(call)
    try:
        arguments = _ARGUMENTS[call.name].model_validate(call.arguments)
    except ValidationError as error:
        first = error.errors()[0]
        return tool_error(f"{call.name}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}")
    if isinstance(arguments, _Shell):
        return show(await sandbox.exec(arguments.command, timeout_s=COMMAND_TIMEOUT_S))
    if isinstance(arguments, _Python):
        return _with_state(await sandbox.python(arguments.code, timeout_s=COMMAND_TIMEOUT_S))
    return _told(await sandbox.file(arguments.request()))


def _with_state(result: ExecResult) -> str:
    state = None if result.interpreter is None else STATES.get(result.interpreter)
    if result.exit_code == 1 and result.limit is None and not result.truncated and state is None:
        # The traceback says it all.
        return tool_error(result.output.replace("\0", "\ufffd").removesuffix("\n"))
    return "\n".join(part for part in (show(result), state) if part)


def _told(result: ExecResult) -> str:
    """What a file tool says, which bounds it itself."""
    text = result.output.replace("\0", "\ufffd")
    return text if result.exit_code == 0 else tool_error(text)
