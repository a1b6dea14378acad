"""`rollmill engine serve` beside a real database; the small engine stands in for vLLM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.config import TINY_MODELS, RunConfig
from common.db import engines, runs
from common.db.session import Database
from deploy.ports import free_port, is_free
from deploy.procfs import all_stats

MODEL = TINY_MODELS / "tiny-calculator"
WITHIN_S = 90.0
INTERPRETER = f"""#!{sys.executable}
# An interpreter that has vLLM, as far as its starter can tell; what it serves is the small engine.
import os
import sys

arguments = sys.argv[1:]
if "-c" in arguments:
    print('{{"vllm": "0.32.0"}}')
    sys.exit()
os.environ["PYTHONPATH"] = {str(Path.cwd())!r}
taken = [part for flag in ("--model", "--port", "--served-model-name")
         for part in (flag, arguments[arguments.index(flag) + 1])]
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "workers.engine", *taken])
"""


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "serve.log"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def service(
    database: Database, database_url: str, tmp_path: Path, log: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, whose engine serves a run."""
    with database.begin() as conn:
        runs.open_run(conn, RunConfig(name="run-a", model=MODEL))
    python = tmp_path / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    command = [sys.executable, "-m", "deploy.cli", "engine", "serve", str(MODEL), "--run", "run-a"]
    options = ["--port", str(port), "--python", str(python), "--data-dir", str(tmp_path / "data")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options],
            env={**environment, "ROLLMILL_DATABASE_URL": database_url, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    until(lambda: process.poll() is not None or "serves run run-a" in log.read_text(), log)
    assert process.poll() is None, log.read_text()
    yield process
    process.kill()
    process.wait(20)


def said(log: Path, port: int) -> list[str]:
    """The lines after the one that says that the engine serves, with N for seconds."""
    lines = log.read_text().replace(f"http://127.0.0.1:{port}", "URL").splitlines()
    first = next(number for number, line in enumerate(lines) if "serves run" in line)
    return [re.sub(r"[\d.]+ s\b", "N s", line) for line in lines[first + 1 :]]


def test_a_removed_engine_drains_and_ends(
    service: subprocess.Popen[bytes], database: Database, log: Path, port: int
) -> None:
    with database.begin() as conn:
        assert engines.remove(conn, f"http://127.0.0.1:{port}")
    until(lambda: service.poll() is not None, log)
    assert service.returncode == 0, log.read_text()
    assert said(log, port) == [
        "engine URL was removed from its run, so it ends",
        "draining engine URL: waiting N s at most; Ctrl-C twice ends it now",
        "engine URL has ended",
    ]
    assert is_free(port)


def test_it_says_when_a_killed_engine_is_up_again_and_when_it_ends(
    service: subprocess.Popen[bytes], database: Database, log: Path, port: int
) -> None:
    (server,) = [stat.pid for stat in all_stats() if stat.ppid == service.pid]
    os.killpg(server, signal.SIGKILL)
    until(lambda: "is up again" in log.read_text(), log)
    service.send_signal(signal.SIGTERM)
    until(lambda: service.poll() is not None, log)
    assert service.returncode == 0, log.read_text()
    assert said(log, port) == [
        "process=engine was killed by SIGKILL; starting it again in N s",
        "engine URL is up again: vLLM was killed by SIGKILL",
        "draining engine URL: waiting N s at most; Ctrl-C again ends it now",
        "engine URL has ended",
    ]
    with database.begin() as conn:
        assert not engines.known(conn, f"http://127.0.0.1:{port}")
