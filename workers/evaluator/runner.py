"""Runs one test inside the evaluator's sandbox: sent as text to the sandbox's own Python, 3.8 or later.

`workers.evaluator.judge` gives it a nonce and the test on its input, which can be read once, and reads two lines.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> None:
    """Two lines on what was standard output, each behind the nonce: that it began, and what came of it."""
    # Before any code under test, which may put something else in their places.
    write, leave, dumps = os.write, os._exit, json.dumps
    given = json.loads(sys.stdin.buffer.read())
    nonce = given.pop("nonce").encode()
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    # Behind Python's own: a file of the agent's takes no module's place, not even one of the tests'.
    for path in given["path"]:
        whole = os.path.abspath(path)
        # Without walls the way to it may be closed, but from here it is not.
        sys.path.append(whole if os.path.isdir(whole) else "/proc/self/cwd/" + path)
    write(out, nonce + b" begin\n")
    try:
        if "source" in given:
            names: dict[str, Any] = {"__name__": "tests"}
            exec(compile(given.pop("source"), "tests.py", "exec"), names)
            if names[given["function"]]() is not None:
                raise TypeError("a test must return None")
            value = None
        else:
            function = getattr(importlib.import_module(given["module"]), given["function"])
            value = function(*given["arguments"])
        said = dumps({"value": value})
    except BaseException as error:  # noqa: BLE001  # whatever the code under test raises is its fault
        said = dumps({"error": type(error).__name__})
    line = nonce + b" " + said.encode() + b"\n"
    while line:
        line = line[write(out, line) :]
    leave(0)


if __name__ == "__main__":
    main()
