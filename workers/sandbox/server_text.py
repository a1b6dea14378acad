"""The command server's modules as one program text, since it goes into sandboxes that hold nothing of ours."""

from __future__ import annotations

import ast
import inspect
from functools import cache

from workers.sandbox import command_server
from workers.sandbox.inside import (
    calls,
    command,
    file_tools,
    frames,
    interpreter,
    kernel_limits,
    own_files,
    processes,
    python_tool,
)

MODULES = (frames, kernel_limits, own_files, processes, command, calls, file_tools, python_tool, command_server)
"""Each behind those whose names it uses."""
OURS = "workers.sandbox."


@cache
def server_text() -> bytes:
    """The modules one behind the other, without what they import of each other.

    Raises ValueError when two of them give a name to two things.
    """
    program = f"INTERPRETER = {inspect.getsource(interpreter)!r}"
    texts, owners = ["from __future__ import annotations\n", program], dict[str, str]()
    for module in MODULES:
        text = inspect.getsource(module)
        body = ast.parse(text).body
        for name in _defined(body):
            if owners.setdefault(name, module.__name__) != module.__name__:
                raise ValueError(f"{owners[name]} and {module.__name__} both define {name}")
        texts.append(_without(text, [part for part in body if _is_left_out(part)]))
    return "\n".join(texts).encode()


def _defined(body: list[ast.stmt]) -> set[str]:
    found = {part.name for part in body if isinstance(part, ast.ClassDef | ast.FunctionDef)}
    for part in body:
        if isinstance(part, ast.Assign):
            found |= {name.id for target in part.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found - {"TYPE_CHECKING"}


def _is_left_out(part: ast.stmt) -> bool:
    if isinstance(part, ast.ImportFrom):
        return part.module == "__future__" or (part.module or "").startswith(OURS)
    # For the type checker alone.
    return isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING"


def _without(text: str, parts: list[ast.stmt]) -> str:
    lines = text.splitlines(keepends=True)
    for part in parts:
        lines[part.lineno - 1 : part.end_lineno] = [""] * ((part.end_lineno or part.lineno) - part.lineno + 1)
    return "".join(lines)
