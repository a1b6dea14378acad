"""A demo run as a child process, and what its report must show. Used by the demo checks and the end-to-end tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common.errors import RollmillError

FIRST_MAX = 0.35
LAST_MIN = 0.75
STOP_TIMEOUT_S = 60.0


class DemoFailed(RollmillError):
    """The demo ended badly, or its report falls short. The message says in what."""


class DemoProcess:
    """Context manager: the demo is ended with the block, whatever happens in it."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self.data_dir = data_dir
        self.report_file = data_dir.parent / f"{data_dir.name}-report.json"
        self.log_file = data_dir.parent / f"{data_dir.name}-demo.log"
        self._argv = [*prefix, python, "-m", "deploy.cli", "demo", "--data-dir", str(data_dir)]
        self._argv += ["--report", str(self.report_file), *arguments]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.report_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.interrupt(signal.SIGTERM)

    @property
    def runs(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal, as Ctrl-C does, and wait for the end; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise DemoFailed(f"the demo did not stop within {STOP_TIMEOUT_S:g} s of {number.name}") from None

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the end; returns the report. Raises DemoFailed with the last lines of the output."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the demo took more than {timeout_s:g} s\n{self.tail()}") from None
        if code != 0:
            raise DemoFailed(f"the demo exited with {code}\n{self.tail()}")
        report: dict[str, Any] = json.loads(self.report_file.read_text())
        return report

    def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Wait until the trainer has published a version."""
        deadline = time.monotonic() + timeout_s
        while not list(self.data_dir.glob(f"weights/*/{version:06d}")):
            if not self.runs:
                raise DemoFailed(f"the demo ended before version {version}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"no version {version} within {timeout_s:g} s\n{self.tail()}")
            time.sleep(0.2)

    def pid_of(self, name: str) -> int | None:
        """Pid of a process of the stack; None while it does not run."""
        try:
            pid: int = json.loads((self.data_dir / "run" / f"{name}.pid").read_text())["pid"]
        except (FileNotFoundError, ValueError):
            return None
        return pid

    def tail(self, num_lines: int = 25) -> str:
        """The last lines of the demo's output."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-num_lines:])


def shortfalls(report: Mapping[str, Any], *, learns: bool = True) -> list[str]:
    """What a report fails to show; [] = all is well."""
    rewards = report["mean_reward_by_version"]
    first, last = mean(rewards[:3]), mean(rewards[-5:])
    zero = ("episodes_lost", "token_mismatches", "episodes_failed")
    checks = [
        (not learns or first <= FIRST_MAX, f"first versions' mean reward {first:.2f} > {FIRST_MAX}"),
        (not learns or last >= LAST_MIN, f"last versions' mean reward {last:.2f} < {LAST_MIN}"),
        (report["lag_max"] <= report["lag_bound"], f"lag {report['lag_max']} > bound {report['lag_bound']}"),
        *[(report[name] == 0, f"{name} = {report[name]}") for name in zero],
        (report["episodes_trained"] > 0, "nothing was trained"),
    ]
    return [complaint for holds, complaint in checks if not holds]


def mean(values: Sequence[float | None]) -> float:
    """Mean of the values that are there; 0 for none."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else 0.0


def figures(report: Mapping[str, Any]) -> str:
    """The report's figures as key=value."""
    rewards, seconds = report["mean_reward_by_version"], report["seconds"]
    return (
        f"first3={mean(rewards[:3]):.3f} last5={mean(rewards[-5:]):.3f} trained={report['episodes_trained']} "
        f"failed={report['episodes_failed']} stale={report['episodes_stale']} lost={report['episodes_lost']} "
        f"lag_max={report['lag_max']} token_mismatches={report['token_mismatches']} "
        f"seconds={seconds['start'] + seconds['train'] + seconds['stop']:.0f}"
    )
