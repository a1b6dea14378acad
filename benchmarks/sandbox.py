"""`python -m benchmarks.sandbox`: what a sandbox's start, one action and an episode of ten actions take.

Alone and eight at once. The start ends with the answer to the first command. Last line: figures of one alone. Starting
Python takes its time anywhere, so that is measured without a sandbox, too, and taken off. For a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import RollmillError
from common.settings import load_settings
from workers.sandbox import open_backend
from workers.sandbox.protocol import Backend, SandboxSession

TIMEOUT_S = 60.0
NUM_ACTIONS = 10
ACTIONS = {"true": "true", "ls": "ls", "python": "python3 -c 1", "cat_mib": "cat mebibyte"}
SYSTEM_PATH = "/usr/bin:/bin"
MAX_START_MS = {"bubblewrap": 40.0}
MAX_ACTION_MS = {"bubblewrap": 8.0, "docker": 10.0}
"""Of the medians, alone, by kind; what is not named has no bound."""
FILES = {"mebibyte": "x" * 1023 + "\n"}


class Bench:
    """Sandboxes of one kind, and how long what they did took."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_made = 0
        self.taken_ms: dict[tuple[str, int], list[float]] = {}
        """What, and how many at once -> times."""

    async def episode(self, at_once: int) -> None:
        """Start, each action, ten short ones, end."""
        self._num_made += 1
        handle = self._backend.handle(self._num_made, 1)
        await asyncio.to_thread(self._backend.create, handle, {"mebibyte": FILES["mebibyte"] * 1024})
        session = self._backend.attach(handle)
        await self._time("start", at_once, lambda: run(session, "true"))
        for name, command in ACTIONS.items():
            for _ in range(NUM_ACTIONS):
                await self._time(name, at_once, partial(run, session, command))
        await self._time("end", at_once, session.close)
        await self._time("episode", at_once, lambda: self._short_episode(handle))
        await asyncio.to_thread(self._backend.destroy, handle)

    async def _short_episode(self, handle: str) -> None:
        session = self._backend.attach(handle)
        for _ in range(NUM_ACTIONS):
            await run(session, "ls")
        await session.close()

    async def _time(self, what: str, at_once: int, action: Callable[[], Awaitable[None]]) -> None:
        begun = time.perf_counter()
        await action()
        self.taken_ms.setdefault((what, at_once), []).append((time.perf_counter() - begun) * 1000)


async def run(session: SandboxSession, command: str) -> None:
    """Raises ValueError for a command that failed."""
    result = await session.exec(command, timeout_s=TIMEOUT_S)
    if result.exit_code != 0:
        raise ValueError(f"{command!r} ended with {result.exit_code}: {result.output:.200}")


def start_of_python_ms() -> list[float]:
    """Without a sandbox, the system's, as sandboxes have it."""
    taken: list[float] = []
    for _ in range(5 * NUM_ACTIONS):
        begun = time.perf_counter()
        subprocess.run(["sh", "-c", ACTIONS["python"]], env={"PATH": SYSTEM_PATH}, check=True, timeout=TIMEOUT_S)
        taken.append((time.perf_counter() - begun) * 1000)
    return taken


def complaints(kind: str, bench: Bench, *, python_ms: float) -> list[str]:
    """What takes longer than it may."""
    found = []
    for what in ("start", *ACTIONS):
        limit = (MAX_START_MS if what == "start" else MAX_ACTION_MS).get(kind)
        median = quantile(bench.taken_ms[what, 1], 0.5) - (python_ms if what == "python" else 0.0)
        if limit is not None and median > limit:
            found.append(f"{what}: median {median:.1f} ms, at most {limit:g} ms expected")
    return found


def quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(backend: Backend, *, episodes: int) -> Bench:
    """Episodes one after the other, then as many eight at once."""
    bench = Bench(backend)
    for at_once in (1, 8):
        for _ in range(max(1, episodes // at_once)):
            await asyncio.gather(*[bench.episode(at_once) for _ in range(at_once)])
    return bench


def table(name: str, bench: Bench) -> Table:
    """Median and 95th percentile."""
    shown = Table(title=f"{name}, ms", title_justify="left")
    for column in ("", "at once", "n", "min", "p50", "p95"):
        shown.add_column(column, justify="left" if not column else "right")
    for (what, at_once), taken in bench.taken_ms.items():
        figures = (f"{value:.1f}" for value in (min(taken), quantile(taken, 0.5), quantile(taken, 0.95)))
        shown.add_row(what, str(at_once), str(len(taken)), *figures)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 = the kind does not work here, or is too slow.

    `docker` takes engine and image from the ROLLMILL_ variables.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--episodes", type=int, default=24, help="of each kind, alone, and as many eight at once")
    parser.add_argument("--kind", choices=["bubblewrap", "docker", "subprocess"], default="bubblewrap")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as data_dir:
        try:
            given = load_settings().model_copy(update={"data_dir": Path(data_dir), "sandbox": arguments.kind})
            backend = open_backend(given)
            bench = asyncio.run(measure(backend, episodes=arguments.episodes))
        except RollmillError as error:
            print(f"sandbox: {error}")
            return 1
    Console().print(table(arguments.kind, bench))
    figures = {
        f"{what}_{name}_ms": quantile(bench.taken_ms[what, 1], share)
        for what in ("start", *ACTIONS, "episode")
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
    figures["python_without_p50_ms"] = quantile(start_of_python_ms(), 0.5)
    missed = complaints(arguments.kind, bench, python_ms=figures["python_without_p50_ms"])
    for complaint in missed:
        print(complaint)
    print(f"sandbox: kind={arguments.kind} " + " ".join(f"{name}={value:.1f}" for name, value in figures.items()))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
