from __future__ import annotations

import re
import struct
from typing import Any

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.evaluator.submission import FileRules, Submission, checked, read_frames

ODD_PATTERNS = ("[ab].py", "{a,b}.py", "/abs.py", "../a.py", "./a.py", "a//b", "src/", "")


def frame(name: bytes, content: bytes) -> bytes:
    return struct.pack(">II", len(name), len(content)) + name + content


def test_files_come_back_as_they_were_packed() -> None:
    files = {"solution.py": b"\x00\xff", "a/b ü.py": b"", "c": b"x" * 100_000}
    packed = Submission(files=files).pack()
    assert Submission.unpack(packed, {"link": 1}) == Submission(files=files, left_out={"link": 1})
    assert len(packed) < 1000


@pytest.mark.parametrize(
    "name",
    [b"/etc/passwd", b"../up", b"a/../b", b"a//b", b"./a", b"", b".", b"a\0b", b"a\nb", b"a\\b", "a\u202eb".encode()],
)
def test_names_that_lead_elsewhere_are_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match="file name"):
        read_frames(frame(name, b"x"))


@pytest.mark.parametrize(
    "data",
    [
        frame(b"a", b"x") * 2,
        frame(b"\xff", b"x"),
        frame(b"a", b"x")[:-1],
        b"\0" * 7,
        struct.pack(">II", 5000, 0) + b"a" * 5000,
        struct.pack(">II", 1, 2**32 - 1) + b"a",
    ],
)
def test_frames_that_make_no_sense_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of them
        read_frames(data)


@pytest.mark.parametrize(
    "files", [{"a.txt": b""}, {"conftest.py": b""}, {"a.py": b"12345"}, {"a.py": b"1234", "b.py": b"1234"}]
)
def test_a_sandbox_that_hands_over_more_than_was_asked_for_is_not_believed(files: dict[str, bytes]) -> None:
    rules = FileRules(wanted=("*.py",), file_bytes=4, total_bytes=7, num_files=2)
    assert checked(rules, {"a.py": b"1234"}) == {"a.py": b"1234"}
    with pytest.raises(EpisodeError, match="the sandbox hands over") as refused:
        checked(rules, files)
    assert refused.value.outcome is Outcome.SANDBOX_FAILED


def test_patterns() -> None:
    pattern = FileRules(wanted=("src/**/*.py", "data?.txt", "out/**")).wanted_pattern
    taken = ("src/a.py", "src/b/c/d.py", "data1.txt", "out/x/y.bin")
    left = ("a.py", "xsrc/a.py", "src/a.pyc", "data12.txt", "data/.txt", "out")
    assert [bool(re.fullmatch(pattern, name)) for name in (*taken, *left)] == [True] * 4 + [False] * 6


def test_rules_that_postgres_could_not_keep_are_refused() -> None:
    with pytest.raises(ValueError, match="total_bytes=9000000 and num_files=200 must be positive, and at most 8388608"):
        FileRules(wanted=("*",), total_bytes=9_000_000)


@pytest.mark.parametrize(
    ("given", "trouble"),
    [
        ({"wanted": ()}, "wanted is empty"),
        ({"wanted": ("*",), "file_bytes": -1}, "file_bytes=-1 must be positive"),
        ({"wanted": ("*",), "file_bytes": 0}, "file_bytes=0 must be positive"),
        *(({"wanted": (odd,)}, f"pattern {re.escape(repr(odd))} matches nothing") for odd in ODD_PATTERNS),
        ({"wanted": ("*",), "refused": ("[ab].py",)}, "matches nothing"),
    ],
)
def test_rules_that_take_nothing_are_refused(given: dict[str, Any], trouble: str) -> None:
    with pytest.raises(ValueError, match=trouble):
        FileRules(**given)


@pytest.mark.parametrize("name", [".gitconfig", "a/.bashrc", ".coveragerc", "pytest.toml", "a/.pytest.toml", ".x/a.py"])
def test_files_that_steer_programs_are_no_solution(name: str) -> None:
    rules = FileRules(wanted=("**",))
    assert re.fullmatch(rules.refused_pattern, name)
    assert not any(re.fullmatch(rules.refused_pattern, name) for name in ("a.py", "a/b.toml", "a.b/c.d.py"))
