"""`rollmill up` with a handler that always raises: it ends with the reason instead of going on for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import TINY_MODELS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HANDLER = """
from workers.handlers.calculator import Calculator


class Raises(Calculator):
    def init(self, payload):
        return {}["no such key"]
"""
CONFIG = f"""
name = "raising"
handler = "raising:Raises"
model = "{TINY_MODELS / "tiny-calculator"}"
[rollout]
group_size = 2
[train]
groups_per_step = 2
max_dropped_groups = 4
"""


def rollmill(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments, "--data-dir", str(folder / "data")],
        env={**os.environ, "PYTHONPATH": str(folder), "ROLLMILL_MAX_ATTEMPTS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_a_handler_that_always_raises_ends_the_command_with_the_reason(tmp_path: Path):
    (tmp_path / "raising.py").write_text(HANDLER)
    (tmp_path / "run.toml").write_text(CONFIG)
    up = ("up", "--config", str(tmp_path / "run.toml"))
    code, said = rollmill(tmp_path, *up)
    assert code == 2, said
    assert "run raising is paused: " in said
    assert "groups were dropped while version 0 was waited for" in said
    assert "failed episodes: handler_failed (e.g. episode " in said
    assert "KeyError: 'no such key'" in said
    code, said = rollmill(tmp_path, *up)
    assert code == 2, said
    assert "run raising is paused (" in said
    assert rollmill(tmp_path, "run", "resume", "raising") == (0, "run raising is active again")
