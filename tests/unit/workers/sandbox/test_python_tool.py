"""What agents do to a Python interpreter that is kept from call to call: each call is answered, and the next one."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import pytest

from tests.unit.workers.sandbox.conftest import FILES, HANDLE
from workers.sandbox.backend import FolderBackend
from workers.sandbox.protocol import Backend, ExecResult, Interpreter, Limit, Limits, SandboxSession

pytestmark = pytest.mark.robustness
KEPT, RESTARTED, ENDED = Interpreter.KEPT, Interpreter.RESTARTED, Interpreter.ENDED


@dataclass(frozen=True, kw_only=True)
class Call:
    """Some code, or a shell command, and how it must end."""

    code: str
    output: str | None
    """A pattern that the whole output matches; None = any output."""
    exit_code: int | None = 0
    state: Interpreter | None = KEPT
    limit: Limit | None = None
    timeout_s: float = 60


def says(code: str, output: str, state: Interpreter = KEPT) -> Call:
    return Call(code=code, output=output, state=state)


def fails(code: str, output: str | None, exit_code: int = 1, state: Interpreter = KEPT) -> Call:
    return Call(code=code, output=output, exit_code=exit_code, state=state)


def times_out(code: str, state: Interpreter) -> Call:
    return Call(code=code, output=None, exit_code=None, state=state, limit=Limit.TIME, timeout_s=0.3)


def shell(command: str, output: str | None = None) -> Call:
    return Call(code=command, output=output, state=None)


ENDS = Call(code="import os; os._exit(0)", output="", state=ENDED)
SLEEP_ON = "import time\nwhile True:\n    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        pass"
TICKS = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.1)
before = ticks
"""
FORGE = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b"\\0" * 5)
    except OSError:
        pass
import time; time.sleep(60)
"""
SIGNAL = (
    "for p in /proc/[0-9]*; do "
    "[[ $(tr '\\0' ' ' <$p/cmdline) == 'python3 -u -c'* ]] && kill -{} ${{p#/proc/}}; done 2>/dev/null; :"
)
"""To the interpreter."""

CASES: dict[str, list[Call]] = {
    "names and imports last": [
        says("import math\nx = 40", ""),
        says("def f(n):\n    return n + 2", ""),
        says("f(x)", "42\n"),
        shell("true"),
        says("math.floor(x / 3)", "13\n"),
    ],
    "the last value": [says("None", ""), says("'a'", "'a'\n"), says("_ * 2", "'aa'\n"), says("x = 1", "")],
    "an exception": [
        says("x = 1", ""),
        fails(
            "def f():\n    return x / 0\nf()",
            r'Traceback \(most recent call last\):\n  File "<call \d+>", line 3, in <module>\n    f\(\)\n'
            r'  File "<call \d+>", line 2, in f\n    return x / 0\n(.*\^.*\n)?ZeroDivisionError: division by zero\n',
        ),
        says("x", "1\n"),
    ],
    "a syntax error": [fails("x = = 1", '  File "<call .*\n.*\n.*\nSyntaxError: .*\n'), says("1", "1\n")],
    "sys.exit": [fails("import sys; y = 5; sys.exit(3)", r"(?s).*SystemExit: 3\n"), says("y", "5\n")],
    "os._exit": [says("z = 1", ""), fails("import os; os._exit(4)", "", 4, ENDED), says("2", "2\n", RESTARTED)],
    "a crash": [fails("import ctypes; ctypes.string_at(0)", None, 139, ENDED), says("2", "2\n", RESTARTED)],
    "kill -9 of itself": [
        fails("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "", 137, ENDED),
        says("2", "2\n", RESTARTED),
    ],
    "endless recursion": [fails("def f():\n    f()\nf()", None), says("2", "2\n")],
    "a forked child that comes back": [
        says("import os; child = os.fork()\nif child: os.waitpid(child, 0)\nchild > 0", "(False\n)?True\n"),
        says("2", "2\n"),
    ],
    "processes of its own end with the call": [
        says("import subprocess; sleeping = subprocess.Popen(['sleep', '60'])", ""),
        says("sleeping.wait()", "-9\n"),
    ],
    "multiprocessing": [
        says("from multiprocessing import get_context\ndef f(n):\n    return n * n", ""),
        says("with get_context('fork').Pool(2) as pool:\n    print(pool.map(f, range(4)))", r"\[0, 1, 4, 9\]\n"),
    ],
    "a thread stands still between calls": [
        says(TICKS, ""),
        shell("sleep 0.3"),
        says("ticks - before < 100", "True\n"),
        says("time.sleep(0.2); ticks > before", "True\n"),
    ],
    "time-out of a loop": [says("x = 1", ""), times_out("while True:\n    x += 1", KEPT), says("x > 1", "True\n")],
    "time-out of what takes no interrupt": [
        times_out(SLEEP_ON, ENDED),
        says("'x' in globals()", "False\n", RESTARTED),
    ],
    "output beyond what is kept": [says("print('x' * 100_000)", f"x{{{Limits().kept_bytes}}}"), says("1", "1\n")],
    "endless output": [
        Call(code="while True:\n    print('x' * 60_000)", output=None, exit_code=137, limit=Limit.OUTPUT),
        says("1", "1\n"),
    ],
    "no input": [fails("input()", r"(?s).*EOFError: .*\n"), says("1", "1\n")],
    "outputs closed and replaced": [
        says("import os, sys; os.close(1); os.close(2); sys.stdout = None", ""),
        says("print('here')", "here\n"),
        says("import io; sys.stderr = sys.stdout = io.StringIO(); print('away')", ""),
        says("print('here')", "here\n"),
    ],
    "no more files to open": [
        fails("kept = []\nwhile True:\n    kept.append(open('/dev/null'))", r"(?s).*Too many open files.*"),
        says("1 + 1", "2\n"),
        says("kept.clear()", ""),
    ],
    "what the interpreter itself uses": [
        says("import builtins, os; os.write = os.read = os.getpid = builtins.print = None", ""),
        says("1 + 1", "2\n"),
        ENDS,
    ],
    "odd text": [
        says("import sys; _ = sys.stdout.buffer.write(bytes(range(128, 256)))", "\ufffd+"),
        says("print('\\udc80')", r"\\udc80\n"),
        fails("print('a\0b')", r"(?s).*null bytes.*"),
    ],
    "long code": [says(f"x = '{'y' * 500_000}'", ""), says("len(x)", "500000\n")],
    "more memory than there is": [
        fails("x = bytearray(5 << 30)", r"(?s).*MemoryError\n"),
        says("1 + 1", "2\n"),
    ],
    "an exception that can't be shown": [
        fails("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", None),
        says("class R:\n    __repr__ = 3", ""),
        fails("R()", r"(?s).*TypeError.*\n"),
        says("1", "1\n"),
    ],
    "a forged answer": [fails(FORGE, None, 137, ENDED), says("1", "1\n", RESTARTED)],
    "a shell that kills it": [
        says("import os; os.getpid() > 0", "True\n"),
        shell(SIGNAL.format("KILL"), ""),
        says("1", "1\n", RESTARTED),
    ],
    "a shell that wakes it": [says("x = 1", ""), shell(SIGNAL.format("CONT"), ""), says("x", "1\n")],
    "no python3": [
        ENDS,
        shell("export OLD=$PATH PATH=/nowhere"),
        fails("1", ".*python3: not found\n", 127, ENDED),
        shell("export PATH=$OLD"),
        says("1", "1\n", RESTARTED),
    ],
    "folder and exports of the shell": [
        ENDS,
        shell("cd data; export A=5"),
        says("import os; os.path.basename(os.getcwd()), os.environ['A']", r"\('data', '5'\)\n", RESTARTED),
    ],
}


@pytest.mark.parametrize("case", CASES)
async def test_every_call_is_answered(bubblewrap: FolderBackend, case: str) -> None:
    bubblewrap.create(HANDLE, FILES)
    session = bubblewrap.attach(HANDLE)
    try:
        await play(session, case)
    finally:
        await session.close()


@pytest.mark.parametrize("kind", ["docker", "podman", "limited"])
async def test_every_call_in_one_sandbox_is_answered(kind: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(kind)
    await asyncio.to_thread(backend.create, HANDLE, FILES)
    session = backend.attach(HANDLE)
    try:
        for case in CASES:
            await play(session, case)
    finally:
        await session.close()


async def play(session: SandboxSession, case: str) -> None:
    for number, call in enumerate(CASES[case]):
        if call.state is None:
            result = await session.exec(call.code, timeout_s=call.timeout_s)
        else:
            result = await session.python(call.code, timeout_s=call.timeout_s)
        # Where cases share a sandbox, the one before may have left none.
        state = result.interpreter if number or call.state is not KEPT else KEPT
        told = shown(case, call, result)
        assert (result.exit_code, result.limit, state) == (call.exit_code, call.limit, call.state), told
        if call.output is not None:
            assert re.fullmatch(call.output, result.output), told


def shown(case: str, call: Call, result: ExecResult) -> str:
    return (
        f"{case}: {call.code[:100]!r}: {result.exit_code} {result.limit} {result.interpreter} {result.output[:600]!r}"
    )


async def test_each_byte_beyond_the_limit_is_counted(bubblewrap: FolderBackend) -> None:
    bubblewrap.create(HANDLE, FILES)
    session = bubblewrap.attach(HANDLE)
    result = await session.python("print('x' * 99_999)", timeout_s=60)
    assert (len(result.output), result.num_dropped_bytes) == (Limits().kept_bytes, 100_000 - Limits().kept_bytes)
    await session.close()


async def test_a_cancelled_call_ends_the_interpreter_and_not_the_sandbox(bubblewrap: FolderBackend) -> None:
    bubblewrap.create(HANDLE, FILES)
    session = bubblewrap.attach(HANDLE)
    await session.python("x = 1", timeout_s=60)
    calling = asyncio.ensure_future(session.python("open('begun', 'w'); import time; time.sleep(60)", timeout_s=60))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert (await session.python("2", timeout_s=60)).output == "2\n"
    assert (await session.exec("echo alive", timeout_s=60)).output == "alive\n"
    await session.close()
