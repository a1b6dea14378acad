"""What a person sees who starts the trainer with something missing: one line, exit code 2, within a moment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import TINY_MODELS

CONFIG = 'name = "first"\nmodel = "nowhere"\n'


def start(config: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("--config", str(config), **variables)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
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


def test_dry_run_says_what_would_be_done_and_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "first"\nmodel = "{TINY_MODELS / "tiny-shell"}"\nhandler = "shell"\n')
    data_dir = tmp_path / "data"
    done = run("--config", str(path), "--dry-run", ROLLMILL_DATA_DIR=str(data_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert "run           first: handler shell, tasks 2,000 that the handler makes, seed 0\n" in done.stdout
    assert "memory        about 81.4 MiB of tensors in the trainer" in done.stdout
    assert not data_dir.exists()

    path.write_text(path.read_text() + "[rollout]\nmax_row_tokens = 4000\n")
    refused = run("--config", str(path), "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("trainer: rollout.max_row_tokens = 4000 is more than the 512 positions of model")


def test_supervised_training_is_a_command_of_the_trainer(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(json.dumps({"ids": [1, 9, 10], "weights": [0, 0, 1]}))
    done = run("sft", "--model", str(TINY_MODELS / "tiny-calculator"), "--rows", str(rows), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"sft: steps=1 rows=1 loss=\d+\.\d{4} held_out_loss=none seconds=\d+\.\d\n", done.stdout)
    assert (out / "model.safetensors").is_file()
