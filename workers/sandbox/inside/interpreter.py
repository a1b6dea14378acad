"""Runs the agent's Python code, call after call, in one module: names, imports and open files last.

A program of its own for the sandbox's `python3`, 3.8 or newer; `workers.sandbox.inside.python_tool` starts it and stops
it between calls. A call is its number, a length and the code; an answer is the number and 2 as the code begins, 1 as it
ends, or 0 where it raised something. What the code prints, the last expression's value and
exceptions go to standard output.

    python3 -u -c THIS CALLS_FD ANSWERS_FD
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import signal
import struct
import sys
import traceback
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

NUM_FRAMES = 8
"""Of a traceback that are shown: the last."""


class Interpreter:
    """One module, in which the code of all calls runs."""

    def __init__(self, calls_fd: int, answers_fd: int) -> None:
        self._calls = calls_fd
        self._answers = answers_fd
        self._outputs = [os.dup(number) for number in (1, 2)]
        self._pid = os.getpid()
        self._module = ModuleType("__main__")
        for fd in (calls_fd, answers_fd):
            os.set_inheritable(fd, False)
        sys.modules["__main__"] = self._module
        # The code may put other things in their place.
        self._read, self._write, self._getpid, self._exit = os.read, os.write, os.getpid, os._exit

    def serve(self) -> NoReturn:
        """Until the server goes."""
        while True:
            number, length = struct.unpack(">II", self._take(8))
            code = self._take(length)
            self._write(self._answers, struct.pack(">IB", number, 2))
            self._restore()
            succeeded = self._call("<call %d>" % number, code.decode("utf-8", "replace"))
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:  # the code's own streams may do anything
                    continue
            if self._getpid() != self._pid:
                self._exit(0 if succeeded else 1)  # a forked child that came back from the code
            self._write(self._answers, struct.pack(">IB", number, succeeded))

    def _take(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self._read(self._calls, num_bytes - len(data))
            if not part:
                self._exit(0)
            data += part
        return data

    def _restore(self) -> None:
        """What an earlier call may have closed or changed, and what a call needs."""
        for number, kept in enumerate(self._outputs, start=1):
            os.dup2(kept, number)
        sys.stdout, sys.stderr = _writer(1), _writer(2)

    def _call(self, name: str, code: str) -> bool:
        # So that tracebacks show the lines.
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            # Only the code is interrupted, not this program between calls.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                self._run(name, code)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._report(error)
            return False
        return True

    def _run(self, name: str, code: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        names = self._module.__dict__
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                sys.stdout.write(repr(value) + "\n")
                names["_"] = value

    def _report(self, error: BaseException) -> None:
        """As Python does, without this program's own frames."""
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<call "):
            frames = frames.tb_next
        try:
            lines = traceback.format_exception(type(error), error, frames, limit=-NUM_FRAMES)
            sys.stdout.write("".join(lines))
        except BaseException as second:
            self._write(1, ("%s, which can't be shown: %s\n" % (type(error).__name__, type(second).__name__)).encode())


def _writer(number: int) -> io.TextIOWrapper:
    file = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", write_through=True)


if __name__ == "__main__":
    Interpreter(int(sys.argv[1]), int(sys.argv[2])).serve()
