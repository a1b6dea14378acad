"""Check functions that may never end, in a process that can be killed: regular expressions, algebra, parsers.

A grader that hangs holds up one EVAL for its time and no longer. That says nothing about the agent: it is an error of
the handler's, tried again and never a reward of 0.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import JsonValue

from common.errors import EpisodeError
from common.outcomes import Outcome

MAX_ANSWER_BYTES = 1 << 20
LOOK_EVERY_S = 0.1
"""How soon an EVAL that was told to stop sees it."""


def grade(
    function: Callable[..., JsonValue],
    *arguments: JsonValue,
    timeout_s: float = 10.0,
    memory_bytes: int = 2 << 30,
) -> JsonValue:
    """What the function gives, called in a process of its own; its arguments and its answer are JSON. Blocks.

    `function` stands in a module by its name. `memory_bytes`: of address space. Raises EpisodeError(HANDLER_FAILED)
    when it raises, takes too long or too much memory, or gives no JSON; ValueError for a function without a place.

        grade(matches, pattern, answer, timeout_s=2)
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ValueError(f"{module}.{name} can't be found by another process: it must stand in a module of its own")
    told = {
        "module": module,
        "function": name,
        "arguments": list(arguments),
        "memory_bytes": memory_bytes,
        "cpu_s": int(timeout_s) + 1,
    }
    what = f"grader {module}.{name}"
    code, answer = _answer(json.dumps(told).encode(), timeout_s, what)
    if code == 0 and len(answer) <= MAX_ANSWER_BYTES:
        with suppress(ValueError, KeyError, RecursionError):
            value: JsonValue = json.loads(answer)["value"]
            return value
    raise EpisodeError(Outcome.HANDLER_FAILED, f"{what} ended with {code}: {_error(answer)}")


def _answer(told: bytes, timeout_s: float, what: str) -> tuple[int, bytes]:
    """Exit code and output. Waits for: its end, in short steps, between which EVAL can be interrupted."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as answered:
        given.write(told)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.evaluator.grader"],
            stdin=given,
            stdout=answered,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )
        deadline = time.monotonic() + timeout_s
        ended = os.pidfd_open(process.pid)
        poller = select.poll()
        poller.register(ended, select.POLLIN)
        try:
            while not poller.poll(LOOK_EVERY_S * 1000):
                if time.monotonic() > deadline:
                    raise EpisodeError(Outcome.HANDLER_FAILED, f"{what} did not end within {timeout_s:g} s")
        finally:
            os.close(ended)
            # With what it started. It has not been waited for, so the number is still its own.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, os.pread(answered.fileno(), MAX_ANSWER_BYTES + 1, 0)


def _environment() -> dict[str, str]:
    """The worker's, without what only workers need to know."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    return given | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _error(answer: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(answer[:MAX_ANSWER_BYTES])["error"])[:300]
    return "no answer"
