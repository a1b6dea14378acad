"""`rollmill eval` as a user calls it: an adapter, on a data set one of whose tasks breaks its handler."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import TINY_MODELS
from common.weights import MANIFEST, WeightStore, read_safetensors_header, verify
from tests.lora import make_adapted, publish_adapter

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_tells_how_a_model_did_and_fails_where_an_episode_failed(tmp_path: Path):
    config, dataset, report = (tmp_path / name for name in ("run.toml", "tasks.jsonl", "report.json"))
    base = TINY_MODELS / "tiny-calculator"
    config.write_text(f'name = "mine"\nmodel = "{base}"\n[train]\nlora_rank = 4\n')
    adapter = publish_adapter(WeightStore(tmp_path / "weights"), "mine", 3, make_adapted(base, seed=1)).path
    good = [{"question": f"{n} + 1", "answer": n + 1} for n in range(5)]
    dataset.write_text("".join(json.dumps(task) + "\n" for task in [*good, {"question": 7}]))
    arguments = ("--config", config, "--dataset", dataset, "--samples", 2, "--report", report, "--model", adapter)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "eval", "--data-dir", tmp_path / "data", *map(str, arguments)],
        env={**os.environ, "ROLLMILL_MAX_ATTEMPTS": "2", "ROLLMILL_RETRY_BACKOFF_S": "0.1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "10 scored of 12, 6 tasks" in done.stdout
    assert "2 failed" in done.stdout
    result = json.loads(report.read_text())
    assert (result["scored"], result["failed"], result["mixed"], result["finished"]) == (10, 2, 0, True)
    assert len(result["pass_at"]) == 2
    assert result["model"] == str(adapter)
    played = tmp_path / "data" / "weights" / "mine-eval" / "000000"
    assert not verify(played, hashlib.sha256((played / MANIFEST).read_bytes()).hexdigest()).tensors.keys() - {
        *read_safetensors_header(base / "model.safetensors")
    }
    assert (played / "model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()
    assert list((tmp_path / "data" / "merged").iterdir()) == []
