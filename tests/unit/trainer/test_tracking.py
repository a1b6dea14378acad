"""Sinks that raise, hang, are slow or leave the process: the trainer does not notice."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from common.config_tracking import TrackingConfig
from common.errors import SetupError
from trainer.tracking import SinkThread, Tracker, check_installed

METRICS = {"reward_mean": 0.5}


@dataclass
class Kept:
    """Keeps what it gets, once it may."""

    may: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when it got the first."""
    versions: list[int] = field(default_factory=list)
    closed: bool = False

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self.begun.set()
        assert self.may.wait(30)
        assert metrics == METRICS
        self.versions.append(version)

    def close(self) -> None:
        self.closed = True


class Failing:
    """Raises whatever it is asked."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        raise self._error

    def close(self) -> None:
        raise self._error


def test_every_step_reaches_a_sink_before_the_end() -> None:
    sink = Kept()
    with Tracker([SinkThread("kept", lambda first: sink)]) as tracker:
        for version in range(1, 6):
            tracker.log(version, METRICS)
        sink.may.set()
    assert sink.versions == [1, 2, 3, 4, 5]
    assert sink.closed


def test_a_slow_sink_loses_what_its_queue_has_no_room_for_and_delays_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, other = Kept(), Kept()
    other.may.set()
    threads = [SinkThread("slow", lambda first: sink, max_waiting=3), SinkThread("other", lambda first: other)]
    tracker = Tracker(threads)
    tracker.log(1, METRICS)
    assert sink.begun.wait(30)
    started = time.monotonic()
    for version in range(2, 101):
        tracker.log(version, METRICS)
    assert time.monotonic() - started < 5
    sink.may.set()
    tracker.close(limit_s=30)
    assert sink.versions[0] == 1
    # One that it was at, those in the queue, less the one that made room for the end.
    assert len(sink.versions) + threads[0].num_dropped == 100
    assert 2 <= len(sink.versions) <= 4
    assert other.versions == list(range(1, 101))
    lines = [record.getMessage() for record in caplog.records]
    assert sum("tracking falls behind, metrics are dropped: sink=slow" in line for line in lines) == 1
    assert lines[-1].startswith(f"tracking is incomplete: sink=slow dropped={threads[0].num_dropped} failed=0 steps")


@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit("not logged in")])
def test_a_sink_that_raises_is_told_once_and_counted(caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    thread = SinkThread("bad", lambda first: Failing(error))
    with caplog.at_level(logging.ERROR), Tracker([thread]) as tracker:
        for version in range(1, 6):
            tracker.log(version, METRICS)
    assert thread.num_failed == 5
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["tracking failed, training goes on: sink=bad version=1", "tracking not closed: sink=bad"]


def test_a_sink_that_cannot_be_opened_is_tried_again_with_the_next_step() -> None:
    sink = Kept()
    sink.may.set()
    opened: list[int] = []

    def open_sink(first: int) -> Kept:
        opened.append(first)
        if first < 3:
            raise ConnectionError("the server is away")
        return sink

    thread = SinkThread("late", open_sink)
    with Tracker([thread]) as tracker:
        for version in range(1, 6):
            tracker.log(version, METRICS)
    assert (opened, sink.versions, thread.num_failed) == ([1, 2, 3], [3, 4, 5], 2)


def test_a_sink_that_hangs_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    thread = SinkThread("hanging", lambda first: sink)
    tracker = Tracker([thread])
    tracker.log(1, METRICS)
    started = time.monotonic()
    tracker.close(limit_s=0.2)
    assert time.monotonic() - started < 5
    assert "tracking hangs, left as it is: sink=hanging" in [record.getMessage() for record in caplog.records]
    sink.may.set()
    assert thread.join(deadline=time.monotonic() + 30)


def test_a_process_ends_with_its_code_though_a_library_would_wait_for_ever() -> None:
    program = """
import atexit, sys, threading
from trainer.tracking import SinkThread, Tracker, leave
forever = threading.Event()
atexit.register(forever.wait)
def open_sink(first):
    forever.wait()
tracker = Tracker([SinkThread("hanging", open_sink)])
tracker.log(1, {})
tracker.close(limit_s=0.1)
sys.stdout.write("done")
leave(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (7, "done")


def test_a_sink_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed(TrackingConfig())
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "wandb"})
    with pytest.raises(SetupError, match=r"^tracking.sinks: wandb is not installed here: pip install wandb, or take"):
        check_installed(TrackingConfig(sinks=("wandb",)))
