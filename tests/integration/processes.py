"""Real processes of the loop for a test, as children of its own, with their output in files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

END_TIMEOUT_S = 10.0


class Processes:
    """Starts processes; all of them are killed at the end of the block, stopped ones too."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(END_TIMEOUT_S)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """`python -m` with these arguments."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        self._running[name] = process
        return process

    def log(self, name: str) -> str:
        """What the process has written."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def until(self, reached: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Wait for it. Fails with the end of every log."""
        deadline = time.monotonic() + within_s
        while not reached():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self._running)
                raise AssertionError(f"not within {within_s:g} s: {what}\n{logs}")
            time.sleep(0.05)
