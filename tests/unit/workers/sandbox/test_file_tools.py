"""What agents ask of the file tools: each request is answered, and nothing outside the sandbox's folder is touched."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.unit.workers.sandbox.conftest import HANDLE
from workers.sandbox.backend import FolderBackend
from workers.sandbox.file_requests import FileRequest, ReplaceInFile, ViewFile, WriteFile
from workers.sandbox.protocol import Backend, SandboxSession

pytestmark = pytest.mark.robustness
FILES = {"notes.txt": "one\ntwo\nthree\n", "src/code.py": "def f():\n    return 1\n", "empty": "", "crlf": "a\r\nb"}
LONG = "x" * 70_000
Step = tuple[FileRequest | str, bool, str]
"""A request or a shell command, whether it succeeds, and a pattern of all that it says."""


def view(path: str, first_line: int | None = None, last_line: int | None = None) -> ViewFile:
    return ViewFile(path=path, first_line=first_line, last_line=last_line)


def write(path: str, text: str) -> WriteFile:
    return WriteFile(path=path, text=text)


def replace(path: str, old: str, new: str) -> ReplaceInFile:
    return ReplaceInFile(path=path, old=old, new=new)


CASES: dict[str, list[Step]] = {
    "view": [(view("notes.txt"), True, " +1\tone\n +2\ttwo\n +3\tthree"), (view("./src//code.py"), True, ".*f.*\n.*1")],
    "view lines": [
        (view("notes.txt", 2, 2), True, r" +2\ttwo\n\[lines 2 to 2 of 3\]"),
        (view("notes.txt", 3, 99), True, r" +3\tthree\n\[lines 3 to 3 of 3\]"),
        (view("notes.txt", 4), False, "notes.txt: has lines 1 to 3, asked for were 4 to 3"),
        (view("notes.txt", 3, 2), False, ".*asked for were 3 to 2"),
        (view("notes.txt", -5), False, ".*asked for were -5 to 3"),
    ],
    "view of a folder": [(view("."), True, "crlf\nempty\nnotes.txt\nsrc/"), (view("src"), True, "code.py")],
    "view of nothing": [(view("empty"), True, ""), (view("gone"), False, "gone: no such file or directory")],
    "carriage returns stay": [
        (replace("crlf", "b", "c"), True, ".*line 2.*"),
        ("cat crlf", True, "a\r\nc"),
    ],
    "view of much": [
        ("for i in $(seq 9000); do echo line $i; done > many", True, ""),
        (view("many"), True, r"(?s) +1\tline 1\n.*\[lines 1 to \d+ of 9000\]"),
        (view("many", 8999), True, r" +8999\tline 8999\n +9000\tline 9000\n\[lines 8999 to 9000 of 9000\]"),
        (write("wide", LONG), True, ".*70000 bytes.*"),
        (view("wide"), True, r" +1\tx{2000} \[cut\]"),
    ],
    "binary": [
        ("printf 'a\\0b' > zero; printf '\\377\\376' > bytes", True, ""),
        (view("zero"), False, "zero: is no text: there are zero bytes in it"),
        (view("bytes"), False, "bytes: is no text: byte 0 is not UTF-8"),
        (replace("zero", "a", "b"), False, "zero: is no text.*"),
    ],
    "too large": [
        ("head -c 2000000 /dev/zero > big", True, ""),
        (view("big"), False, "big: has more than 1048576 bytes: use the shell.*"),
        (replace("big", "a", "b"), False, "big: has more than.*"),
    ],
    "write": [
        (write("new/deep/file.txt", "é\n"), True, "wrote 3 bytes to new/deep/file.txt"),
        ("cat new/deep/file.txt; ls -A new/deep", True, "é\nfile.txt\n"),
        (write("new/deep/file.txt", ""), True, "wrote 0 bytes.*"),
        ("wc -c < new/deep/file.txt", True, " *0\n"),
    ],
    "write keeps the mode": [
        ("chmod 751 notes.txt", True, ""),
        (write("notes.txt", "x"), True, ".*"),
        ("stat -c %a notes.txt; cat notes.txt", True, "751\nx"),
    ],
    "write where nothing can be": [
        (write("src", "x"), False, "src: is no plain file"),
        (write("notes.txt/x", "y"), False, "notes.txt/x: not a directory"),
        (write(".", "x"), False, ".: is a folder"),
        (write("a\0b", "x"), False, ".*no name that a file can have"),
        (write("a\udc99b/\ud800", "x"), False, ".*no name that a file can have"),
        (write("n" * 300, "x"), False, ".*file name too long"),
        (write("sealed/x", "y"), True, ".*"),
        ("chmod 500 sealed", True, ""),
        (write("sealed/x", "z"), False, "sealed/x: permission denied"),
        ("cat sealed/x; chmod 700 sealed", True, "y"),
    ],
    "replace": [
        (replace("src/code.py", "return 1", "return 2\n"), True, "replaced the text at line 2 of src/code.py"),
        ("cat src/code.py", True, "def f\\(\\):\n    return 2\n\n"),
        (replace("src/code.py", "2\n\n", ""), True, ".*"),
        ("cat src/code.py", True, "def f\\(\\):\n    return "),
    ],
    "replace what is not there, or not alone": [
        (replace("notes.txt", "four", "x"), False, "notes.txt: does not hold the old text"),
        (replace("notes.txt", "", "x"), False, "notes.txt: the old text must not be empty"),
        (replace("notes.txt", "t", "x"), False, r".*2 times \(lines 2, 3\): give more of what is around it"),
        (write("again", "aaa"), True, ".*"),
        (replace("again", "aa", "x"), False, r".*2 times \(lines 1, 1\).*"),
        ("cat notes.txt again", True, "one\ntwo\nthree\naaa"),
    ],
    "paths out of the folder": [
        (view("../x"), False, r"\.\./x: must not have \.\. in it"),
        (view("src/../notes.txt"), False, r".*must not have \.\. in it"),
        (view("/etc/passwd"), False, "/etc/passwd: must lie in /.*"),
        (view("/proc/self/environ"), False, ".*must lie in /.*"),
        (write("/tmp/x", "y"), False, "/tmp/x: must lie in /.*"),
    ],
    "links": [
        ("ln -s /etc/passwd file; ln -s src folder; ln -s / root; ln -s /proc/self/environ env", True, ""),
        (view("file"), False, "file: a link, or below one"),
        (view("folder/code.py"), False, "folder/code.py: a link, or below one"),
        (view("root/etc/passwd"), False, ".*a link, or below one"),
        (view("env"), False, ".*a link, or below one"),
        (write("file", "x"), False, "file: is no plain file"),
        (write("folder/x", "x"), False, "folder/x: (a link, or below one|not a directory)"),
        (write("root/tmp/a/b", "x"), False, ".*(a link, or below one|not a directory)"),
        (replace("file", "root", "x"), False, "file: a link, or below one"),
    ],
    "pipes": [
        ("mkfifo pipe", True, ""),
        (view("pipe"), False, "pipe: is no plain file"),
        (write("pipe", "x"), False, "pipe: is no plain file"),
    ],
    "much text": [
        (write("much", "y" * 900_000), True, ".*900000.*"),
        (replace("much", "y" * 900_000, "z"), True, ".*"),
        ("cat much", True, "z"),
        (write("much", "y" * 1_100_000), False, "(?s).*the limit is 1048576\n"),
    ],
    "the folder that commands stand in does not count": [
        ("cd src", True, ""),
        (view("code.py"), False, ".*no such file.*"),
        (view("src/code.py", 1, 1), True, r"(?s).*f\(\).*"),
        ("basename $PWD", True, "src\n"),
    ],
}


@pytest.mark.parametrize("case", CASES)
async def test_every_request_is_answered(bubblewrap: FolderBackend, case: str) -> None:
    bubblewrap.create(HANDLE, FILES)
    session = bubblewrap.attach(HANDLE)
    try:
        await play(session, case)
    finally:
        await session.close()


@pytest.mark.parametrize("kind", ["docker", "podman", "limited"])
async def test_every_request_in_one_sandbox_is_answered(kind: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(kind)
    await asyncio.to_thread(backend.create, HANDLE, {})
    session = backend.attach(HANDLE)
    try:
        for case in CASES:
            await session.exec("rm -rf ./*", timeout_s=60)
            for path, text in FILES.items():
                assert (await session.file(write(path, text))).exit_code == 0
            await play(session, case)
    finally:
        await session.close()


async def play(session: SandboxSession, case: str) -> None:
    for request, succeeds, said in CASES[case]:
        if isinstance(request, str):
            result = await session.exec(request, timeout_s=60)
        else:
            result = await session.file(request)
        told = f"{case}: {str(request)[:200]}: {result.exit_code} {result.limit} {result.output[:300]!r}"
        assert (result.exit_code == 0, result.limit) == (succeeds, None), told
        assert re.fullmatch(said, result.output), told
