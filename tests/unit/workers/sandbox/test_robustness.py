"""What agents do to a shell, by accident or not: the sandbox answers each command, and the next one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from tests.unit.workers.sandbox.conftest import WALLED, containers
from workers.sandbox.backend import FolderBackend
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Backend, ExecResult, Limit, Limits, SandboxSession

pytestmark = pytest.mark.robustness
HANDLE = "7-1"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command and how it must end."""

    command: str
    output: str | None = ""
    """A pattern that the whole output matches; None = any output."""
    code: int | None = 0
    """None = stopped because its time was up."""
    timeout_s: float = 20
    limit: Limit | None = None


def says(command: str, output: str, *, code: int | None = 0) -> Step:
    return Step(command=command, output=output, code=code)


def ends(command: str, code: int | None = 0) -> Step:
    return Step(command=command, output=None, code=code)


def times_out(command: str, output: str = "") -> Step:
    return Step(command=command, output=output, code=None, timeout_s=0.4, limit=Limit.TIME)


LIVES = says("echo alive", "alive\n")
PYTHON = "/usr/bin/python3"

CASES: dict[str, list[Step]] = {
    "nothing": [says("", ""), LIVES],
    "only a comment": [says("# nothing", ""), LIVES],
    "folder carried over": [says("cd data", ""), says("basename $PWD; cat maple12", "data\ncode 42\n")],
    "folder with an odd name": [
        ends("""d=$'a b\\n"'"'"'$x\\u00e9'; mkdir "$d"; cd "$d"; echo in > file"""),
        says("cat file", "in\n"),
    ],
    "folder that was removed": [ends("mkdir gone; cd gone; rmdir ../gone"), says("cat notes.txt", "hello\n")],
    "folder after a failure": [ends("cd data; false", 1), says("ls", "maple12\n")],
    "folder after exit": [ends("cd data; exit 7", 7), says("ls", "maple12\n")],
    "exported variable": [ends("export A=1 B='two words'"), says("echo $A $B", "1 two words\n")],
    "exported value with newline, quotes, bytes": [
        ends("export A=$'l1\\nl2 \"q\" \\'s\\' $x `y` \\\\ \\u00e9'"),
        says("""printf '%s' "$A" | md5sum""", "ee[0-9a-f]+  -\n|[0-9a-f]{32}  -\n"),
        says("""[ "$A" = $'l1\\nl2 "q" \\'s\\' $x `y` \\\\ \\u00e9' ] && echo same""", "same\n"),
    ],
    "unset variable": [ends("export A=1"), ends("unset A HOME"), says("echo ${A-none} ${HOME-none}", "none none\n")],
    "plain variable is not carried": [ends("A=1"), says("echo ${A-none}", "none\n")],
    "function": [ends("greet() { echo hi $1; }"), says("greet you", "hi you\n")],
    "function that hides a built-in": [ends("cd() { echo no; }; export -f cd"), says("cd data", "no\n")],
    "path": [ends("export PATH=/nowhere"), ends("ls", 127), says("echo $PATH", "/nowhere\n")],
    "read-only variable": [ends("declare -rx A=1"), says("A=2; echo $A", ".*readonly variable\n", code=1), LIVES],
    "large environment": [ends("export A=$(head -c 60000 /dev/zero | tr '\\0' x)"), says("echo ${#A}", "60000\n")],
    "environment that is too large": [
        ends("export A=$(head -c 2000000 /dev/zero | tr '\\0' x)"),
        says("echo ${#A}", "0\n"),
        LIVES,
    ],
    "exit": [ends("exit 3", 3), LIVES],
    "exec": [says("exec echo replaced", "replaced\n"), LIVES],
    "exec of nothing there": [ends("exec /no/such/program", 127), LIVES],
    "set -e": [ends("set -e; false; echo no", 1), says("false; echo yes", "yes\n")],
    "set -x shows only the command": [says("set -x; true", r"\+ true\n"), says("true", "")],
    "set -u, -C, -f": [ends("set -uCf; export A=1"), says("echo $A${none}; echo x > notes.txt", "1\n")],
    "own trap at exit": [says("trap 'echo bye' EXIT; echo hi", "hi\nbye\n"), LIVES],
    "unterminated quote": [ends("echo 'open", 2), LIVES],
    "unterminated here-document": [says("cat <<END\nin it", "(.*warning.*\n)?in it(\n)?"), LIVES],
    "here-document": [says("cat <<'END'\n$x `y`\nEND\necho after", r"\$x `y`\nafter\n")],
    "syntax error": [ends("if then", 2), LIVES],
    "carriage returns": [ends("echo a\r\necho b\r"), LIVES],
    "kill -9 of the shell": [ends("kill -9 $$", 137), LIVES],
    "kill -TERM of the shell": [ends("kill -TERM $$", 143), LIVES],
    "the shell stops itself": [times_out("kill -STOP $$"), LIVES],
    "crash": [ends(f"{PYTHON} -c 'import os; os.abort()'", 134), LIVES],
    "endless recursion": [ends("ulimit -s 256; f() { f; }; f", 139), LIVES],
    "readers of input": [
        says("cat; read line; echo $?", "1\n"),
        ends(f"{PYTHON} -c 'input()'", 1),
        says("bash; sh -i 2>/dev/null; echo done", "done\n"),
    ],
    "no terminal": [says("tty; [ -t 0 ] || echo none", "not a tty\nnone\n")],
    "every byte": [
        says(f"{PYTHON} -c 'import sys; sys.stdout.buffer.write(bytes(range(256)))' | head -c 128 | wc -c", "128\n"),
        Step(command=f"{PYTHON} -c 'import sys; sys.stdout.buffer.write(bytes(range(128, 256)))'", output="\ufffd+"),
        says("printf 'a\\0b'", "a\0b"),
    ],
    "no newline at the end": [says("printf end", "end"), LIVES],
    "a line of 60,000": [says("head -c 60000 /dev/zero | tr '\\0' y", "y{60000}")],
    "errors only": [says("echo wrong >&2", "wrong\n")],
    "closed outputs": [says("exec >&- 2>&-; echo no; exit 4", "", code=4), LIVES],
    "broken pipe": [says("yes | head -1", "y\n"), LIVES],
    "time-out": [times_out("echo begun; sleep 60", "begun\n"), LIVES],
    "time-out of a loop without processes": [times_out("while :; do :; done"), LIVES],
    "time-out of what ignores signals": [times_out("trap '' TERM INT HUP; while :; do sleep 1; done"), LIVES],
    "time-out of a tree": [times_out("for i in 1 2 3; do (setsid sh -c 'sleep 60 | sleep 60') & done; wait"), LIVES],
    "time-out leaves the state as it was": [
        ends("cd data; export A=1"),
        times_out("cd /; export A=2; sleep 60"),
        says("ls; echo $A", "maple12\n1\n"),
    ],
    "background job": [says("sleep 60 & echo $?", "0\n"), says("jobs; wait; echo", "\n")],
    "background job that writes later": [says("(sleep 0.2; echo late) & :", ""), says("sleep 0.4", "")],
    "daemon": [ends("nohup setsid sh -c 'sleep 60 & sleep 60 &' >/dev/null 2>&1 </dev/null & disown"), LIVES],
    "job that is waited for": [says("(sleep 0.1; echo job) & wait; echo end", "job\nend\n")],
    "60 jobs at once": [says("for i in $(seq 60); do sleep 60 & done; jobs | wc -l", "60\n"), LIVES],
    "orphans are reaped": [
        ends("for i in $(seq 50); do (true &) ; done; sleep 0.2"),
        # The server's alone: without walls a command sees the whole machine's.
        says(
            "dead=$(grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null); "
            r'grep -l "^PPid:[[:space:]]*$PPID\$" $dead /dev/null 2>/dev/null | wc -l',
            "[01]\n",
        ),
    ],
    "command of 120,000": [says("#" + "x" * 120_000 + "\necho long", "long\n"), LIVES],
    "command of 1,000,000": [says(": " + "x" * 1_000_000 + "\necho long", "long\n"), LIVES],
    "folder emptied": [ends("rm -rf ./* ./.??*"), says("ls -A; echo x > new; cat new", "x\n")],
    "folder closed": [ends("cd data && chmod 000 ."), ends("chmod 755 data 2>/dev/null; :"), LIVES],
    "its own limits last one command": [ends("ulimit -n 20; ulimit -f 1"), says("head -c 99999 notes.txt", "hello\n")],
    "file beyond its limit": [ends("head -c 300000000 /dev/zero > big", 153), ends("rm big"), LIVES],
    "too many open files": [
        says(f"{PYTHON} -c 'o=[open(\"/dev/null\") for _ in range(2000)]' 2>&1 | tail -1", ".*Too many open files.*\n"),
        LIVES,
    ],
    "40 commands": [says(f"echo {number}", f"{number}\n") for number in range(40)],
}

WALLED_CASES: dict[str, list[Step]] = {
    "the folder before": [ends("cd data"), ends("cd - >/dev/null"), says("cat notes.txt", "hello\n")],
    "kill of everything": [ends("kill -9 -1; kill -9 0", 137), LIVES],
    "kill of the server": [
        ends("for s in KILL STOP TERM INT HUP QUIT SEGV CHLD USR1 PIPE; do kill -$s 1; done; kill -9 $PPID; :"),
        LIVES,
    ],
    "limits of the server": [ends("prlimit --pid 1 --nofile=0:0", 1), ends("prlimit --pid 1 --cpu=1:1", 1), LIVES],
    "rubbish as the saved state": [
        ends("trap - EXIT; head -c 3000 /dev/urandom > /.sandbox/state/end"),
        LIVES,
        ends("trap - EXIT; mkfifo /.sandbox/state/pipe; mv /.sandbox/state/pipe /.sandbox/state/end"),
        LIVES,
        ends("trap - EXIT; rm /.sandbox/state/end; ln -s /dev/zero /.sandbox/state/end"),
        LIVES,
    ],
    "full folder of the saved state": [ends("head -c 9000000 /dev/zero > /.sandbox/state/x; :"), LIVES],
    "folder and files of the saved state removed": [ends("rm -rf /.sandbox/state; :"), LIVES],
    "shared memory is a disk": [says("echo x > /dev/shm/x; cat /dev/shm/x", "x\n"), says("cat /dev/shm/x", "x\n")],
}


@pytest.mark.parametrize("case", CASES)
async def test_every_command_is_answered(session: SandboxSession, case: str) -> None:
    await play(session, CASES[case])


@pytest.mark.parametrize("case", WALLED_CASES)
async def test_every_command_within_walls_is_answered(walled_session: SandboxSession, case: str) -> None:
    await play(walled_session, WALLED_CASES[case])


async def play(session: SandboxSession, steps: list[Step]) -> None:
    for step in steps:
        result = await session.exec(step.command, timeout_s=step.timeout_s)
        assert (result.exit_code, result.limit) == (step.code, step.limit), shown(step, result)
        if step.output is not None:
            assert re.fullmatch(step.output, result.output), shown(step, result)


def shown(step: Step, result: ExecResult) -> str:
    return f"{step.command[:200]}: {result.exit_code} {result.limit} {result.output[:300]!r}"


@pytest.mark.parametrize("num_bytes", [65_535, 65_536, 65_537, 10_000_000])
async def test_each_byte_of_output_is_kept_or_counted(session: SandboxSession, num_bytes: int) -> None:
    result = await session.exec(f"head -c {num_bytes} /dev/zero | tr '\\0' x", timeout_s=30)
    kept = min(num_bytes, Limits().kept_bytes)
    assert (len(result.output), result.num_dropped_bytes) == (kept, num_bytes - kept)
    assert (result.exit_code, result.limit) == (0, None)


SMALL = Limits(memory_bytes=150 << 20, cpu_s=1, num_processes=24, disk_bytes=8 << 20, num_inodes=300)
HOG = f"{PYTHON} -c 'import time; x = bytearray({{}} << 20); x[::4096] = x[::4096]; time.sleep(20)'"


@pytest.fixture(params=WALLED)
def small_backend(request: pytest.FixtureRequest, folders: SandboxFolders) -> Iterator[Backend]:
    """Each kind in turn, with little of everything."""
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap")
        yield FolderBackend(folders, Bubblewrap(SMALL))
    else:
        yield from containers(folders, request.getfixturevalue(f"{request.param}_engine"), SMALL)


@pytest.fixture
async def small(small_backend: Backend) -> AsyncIterator[SandboxSession]:
    """A sandbox with little of everything."""
    await asyncio.to_thread(small_backend.create, HANDLE, {})
    session = small_backend.attach(HANDLE)
    yield session
    await session.close()


@pytest.mark.parametrize(
    ("command", "limit", "code"),
    [
        (HOG.format(300), Limit.MEMORY, 137),
        (f"for i in 1 2 3 4 5; do {HOG.format(60)} & done; wait", Limit.MEMORY, 137),
        ("while :; do :; done", Limit.CPU, 137),
        ("for i in 1 2; do (while :; do :; done) & done; wait", Limit.CPU, 137),
        ("yes", Limit.OUTPUT, 137),
        ("head -c 20000000 /dev/zero > big", Limit.DISK, 1),
        ("head -c 20000000 /dev/zero > /tmp/big", Limit.DISK, 1),
        ("head -c 20000000 /dev/zero > /dev/shm/big", Limit.DISK, 1),
        ("for i in $(seq 1000); do : > $i || kill -9 $$; done 2>/dev/null; sleep 1", Limit.DISK, 137),
        (f"{PYTHON} -c 'import os,time\nfor _ in range(50): os.fork() or time.sleep(9)'", Limit.PROCESSES, 1),
    ],
)
async def test_a_limit_is_named_and_the_sandbox_lives_on(
    small: SandboxSession, command: str, limit: Limit, code: int
) -> None:
    result = await small.exec(command, timeout_s=20)
    assert (result.limit, result.exit_code, result.timed_out) == (limit, code, False), result.output[:300]
    after = await small.exec("rm -rf /workspace/* /tmp/* /dev/shm/*; echo alive", timeout_s=20)
    assert (after.output, after.limit) == ("alive\n", None)


async def test_what_forked_processes_share_counts_once(small: SandboxSession) -> None:
    script = "import os,time\nx = bytearray(70 << 20); x[::4096] = x[::4096]\n"
    script += "for _ in range(6): os.fork() or time.sleep(9)\n"
    result = await small.exec(f"{PYTHON} -c '{script}time.sleep(0.5)'", timeout_s=20)
    assert (result.limit, result.exit_code) == (None, 0)


async def test_a_fork_bomb_ends_with_its_time(small: SandboxSession) -> None:
    started = time.monotonic()
    result = await small.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout_s=1)
    assert result.timed_out
    assert time.monotonic() - started < 10
    assert (await small.exec("echo alive", timeout_s=20)).output == "alive\n"
