"""`python -m MODULE` as a process that dies by SIGKILL at a chosen point, for tests of what it leaves behind.

Nothing of ours is patched: what the process does is seen through the hooks that Python (audit events), SQLAlchemy and
torch have for it, as lines of text. A point is a pattern over these lines, and the process kills itself there.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import Engine, Pool, event
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

END_TIMEOUT_S = 60.0
PRELOADED = (__name__, "trainer.loop", "trainer.tiny", "workers.feeder")
AUDITED = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "tempfile.mkdtemp"})
"""Each is told before it happens."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a process dies: just before what the line tells of, unless it says that it is after."""

    pattern: str
    """Of the line: `open PATH MODE`, `os.rename FROM TO`, `sql STATEMENT PARAMETERS`, `forward MODULE`,
    `backward MODULE`, `optimizer step` …, and for each statement of a transaction `commit after STATEMENT PARAMETERS`
    and `after commit of STATEMENT PARAMETERS`."""
    at: int = 1
    """Which of the lines that match; the first is 1."""


class _Watch:
    """Counts the lines that match."""

    def __init__(self, point: Point) -> None:
        self._pattern = re.compile(point.pattern)
        self._left = point.at
        self._statements: list[str] = []
        """Of the transaction."""

    def see(self, line: str) -> None:
        if self._pattern.search(line):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def listen(self) -> None:
        sys.addaudithook(lambda name, args: self.see(" ".join(map(str, (name, *args)))) if name in AUDITED else None)
        event.listen(Engine, "before_cursor_execute", self._execute)
        event.listen(Engine, "commit", lambda conn: self._see_all("commit after"))
        # Only when its transaction is over does a connection go back.
        event.listen(Pool, "checkin", self._over)
        register_module_forward_hook(self._forward)
        register_optimizer_step_post_hook(lambda *_: self.see("optimizer step"))

    def _execute(self, conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        self._statements.append(f"{' '.join(statement.split())} {parameters}")
        self.see(f"sql {self._statements[-1]}")

    def _see_all(self, what: str) -> None:
        for statement in self._statements:
            self.see(f"{what} {statement}")

    def _over(self, *_: Any) -> None:
        self._see_all("after commit of")
        self._statements.clear()

    def _forward(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        name = type(module).__name__
        if isinstance(output, torch.Tensor) and output.requires_grad:
            self.see(f"forward {name}")
            output.register_hook(lambda _: self.see(f"backward {name}"))


def live(argv: Sequence[str], environment: Mapping[str, str], log: Path, point: Point | None) -> None:
    """The whole life of the process: `python -m` with `argv`, which ends at the point if it comes to it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = list(argv)
    if point is not None:
        _Watch(point).listen()
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def run_until(
    argv: Sequence[str], *, environment: Mapping[str, str], log: Path, point: Point | None, timeout_s: float
) -> int | None:
    """Exit code of the process, which is dead afterwards; None = it was still running after `timeout_s`.

    It is there in milliseconds: it is forked off a process that has imported what it needs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=live, args=(argv, dict(environment), log, point), daemon=True)
    process.start()
    process.join(timeout_s)
    exit_code = process.exitcode
    process.kill()
    process.join(END_TIMEOUT_S)
    assert not process.is_alive()
    return exit_code
