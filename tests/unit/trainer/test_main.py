"""What a person sees who starts the trainer with something missing: one line, exit code 2, within a moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = 'name = "first"\nmodel = "nowhere"\n'


def start(config: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    return subprocess.run(
        [sys.executable, "-m", "trainer", "--config", str(config)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("config", "variables", "line"),
    [
        (None, {}, "trainer: run configuration {config} cannot be read: No such file or directory"),
        ('name = "No"', {}, "trainer: run configuration {config}: name: "),
        (CONFIG, {}, "trainer: ROLLMILL_DATABASE_URL is not set: "),
        (CONFIG, {"ROLLMILL_DATABSE_URL": "x"}, "trainer: unknown variable ROLLMILL_DATABSE_URL: "),
    ],
)
def test_mistake_is_one_line_and_exit_code_two(
    tmp_path: Path, config: str | None, variables: dict[str, str], line: str
) -> None:
    path = tmp_path / "run.toml"
    if config is not None:
        path.write_text(config)
    done = start(path, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(line.format(config=path))
    assert done.stderr.count("\n") == 1
