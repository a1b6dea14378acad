from __future__ import annotations

import ast
import sys

from workers.sandbox.server_text import server_text


def test_the_program_needs_only_python_3_8_and_its_standard_library() -> None:
    program = ast.parse(server_text(), feature_version=(3, 8))
    imported = set()
    for part in ast.walk(program):
        if isinstance(part, ast.Import):
            imported |= {name.name for name in part.names}
        if isinstance(part, ast.ImportFrom):
            imported.add(part.module or "")
    assert imported - {"__future__"} <= sys.stdlib_module_names
    assert "typing" not in imported


def test_no_name_of_the_program_is_given_twice() -> None:
    names = [part.name for part in ast.parse(server_text()).body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
    assert len(names) == len(set(names)) > 10
