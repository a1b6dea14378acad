from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import JsonValue

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.evaluator.grading import grade
from workers.stage_threads import StageThreads, StageTimeout


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def spawns(file: str) -> JsonValue:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return None


def takes_memory() -> int:
    return len(bytearray(4 << 30))


def raises() -> JsonValue:
    raise KeyError("no such unit")


def says_no_json() -> JsonValue:
    print("hello", flush=True)  # noqa: T201
    return object()  # type: ignore[return-value]


def environment() -> JsonValue:
    return [name for name in os.environ if name.startswith("ROLLMILL_")]


def assert_fails(call: object, detail: str) -> None:
    with pytest.raises(EpisodeError, match=detail) as failed:
        call()  # type: ignore[operator]
    # An error of the handler's: tried again, never a reward.
    assert failed.value.outcome is Outcome.HANDLER_FAILED


def test_its_answer_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_DATABASE_URL", "postgresql://secret")
    assert grade(matches, "a+", "aaa", timeout_s=60) is True
    assert grade(environment, timeout_s=60) == []


def test_a_pattern_that_backtracks_for_ever_is_an_error_in_time() -> None:
    assert_fails(lambda: grade(matches, "(a+)+", "a" * 60 + "b", timeout_s=1), r"matches did not end within 1 s")


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        (takes_memory, "takes_memory ended with 1: MemoryError"),
        (raises, "raises ended with 1: KeyError: 'no such unit'"),
        (says_no_json, "says_no_json ended with 1: TypeError: Object of type object is not JSON"),
    ],
)
def test_what_goes_wrong_names_the_grader(function: object, detail: str) -> None:
    assert_fails(lambda: grade(function, timeout_s=60), detail)  # type: ignore[arg-type]


def test_an_eval_that_is_told_to_stop_ends_the_grader_and_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    work = StageThreads("eval").submit(lambda: grade(spawns, str(file), timeout_s=600))
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    work.cancel()
    with pytest.raises(StageTimeout):
        work.result(60)
    until(lambda: not any(is_alive(int(pid)) for pid in file.read_text().split()))


def until(reached: object) -> None:
    deadline = time.monotonic() + 60
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_function_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="must stand in a module of its own"):
        grade(lambda: 1)
