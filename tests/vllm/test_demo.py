"""The whole loop as a user runs it, with real vLLM in the small engine's place."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from benchmarks.demo_process import DemoProcess, shortfalls
from tests.demo_processes import processes_of

pytestmark = pytest.mark.long

NUM_VERSIONS = 6
START_TIMEOUT_S = 240
TRAIN_TIMEOUT_S = 300


@pytest.mark.timeout(START_TIMEOUT_S + TRAIN_TIMEOUT_S)
def test_the_demo_trains_on_vllm(tmp_path: Path) -> None:
    options = ("--engine", "vllm", "--versions", str(NUM_VERSIONS), "--seed", "21")
    with DemoProcess(tmp_path / "demo", *options) as demo:
        report = demo.wait(timeout_s=START_TIMEOUT_S + TRAIN_TIMEOUT_S - 60)
    assert shortfalls(report, learns=False) == []
    assert report["episodes_trained"] == NUM_VERSIONS * 16 * 8
    assert report["restarts"]["engine"] == 0


def test_ctrl_c_while_vllm_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    with DemoProcess(tmp_path / "demo", env={"ENGINE": "vllm"}) as demo:
        deadline = time.monotonic() + 60
        while demo.pid_of("engine") is None:
            assert demo.runs, demo.tail()
            assert time.monotonic() < deadline, demo.tail()
            time.sleep(0.1)
        assert demo.interrupt(signal.SIGINT) == 130
    assert not processes_of(tmp_path / "demo")
