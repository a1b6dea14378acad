"""The process of one check function: `grading.grade` starts it, gives it a call as JSON, and kills it in time."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Make the call; its answer, or its error, goes to what was standard output."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1
    told = json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (told["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (told["cpu_s"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        function = importlib.import_module(told["module"])
        for name in told["function"].split("."):
            function = getattr(function, name)
        answer = {"value": function(*told["arguments"])}  # type: ignore[operator]
        said = json.dumps(answer)
        code = 0
    except Exception as error:  # noqa: BLE001  # the process's top: whoever started it raises it again
        said, code = json.dumps({"error": f"{type(error).__name__}: {error}"}), 1
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
