"""`python -m benchmarks.sandbox_soak`: thousands of episodes in one process leave nothing of their sandboxes behind.

Each episode writes a file, runs commands that leave processes behind, keeps a Python interpreter, runs into its time
limit now and then, and ends. Counted at the start and at the end: the worker's descriptors, threads, child processes
and mounts, namespaces of the machine, files of its data folder, control groups, and its memory. Last line: how much
they grew. Beside nothing else that makes sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from common.errors import RollmillError
from common.settings import load_settings
from workers.sandbox import open_backend
from workers.sandbox.file_requests import WriteFile
from workers.sandbox.protocol import Backend, SandboxSession

TIMEOUT_S = 60.0
HANG_EVERY = 50
"""One episode of so many has a command that is stopped at its time limit."""
HANG_S = 0.2
LEAVES_PROCESSES = "(setsid sleep 600 &) ; nohup sleep 600 > /dev/null 2>&1 & mkfifo -m 600 pipe; echo done"
WARM_UP = 100
"""Episodes before the first count: imports, pools of threads, caches."""
MAX_GROWTH_MIB = 8.0
"""Of the worker's memory. What leaks a page for each of 2,000 episodes grows as much."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the worker holds of the machine."""

    fds: int
    threads: int
    processes: int
    """Its descendants."""
    mounts: int
    """Of its own namespace."""
    namespaces: int
    """Of processes and of mounts, of the whole machine: each lives as long as a process in it, whoever's child."""
    files: int
    """Below its data folder."""
    cgroups: int
    mib: float
    """Resident."""


async def play(backend: Backend, number: int) -> None:
    """One episode's sandbox from its making to its removal."""
    handle = backend.handle(number, 1)
    await asyncio.to_thread(backend.create, handle, {"notes.txt": "hello\n"})
    session = backend.attach(handle)
    try:
        await _act(session, number)
    finally:
        await session.close()
        await asyncio.to_thread(backend.destroy, handle)


async def _act(session: SandboxSession, number: int) -> None:
    await _check(session, "cat notes.txt", "hello\n")
    await _check(session, LEAVES_PROCESSES, "done\n")
    written = await session.file(WriteFile(path="answer.py", text=f"print({number})\n"))
    if written.exit_code != 0:
        raise ValueError(f"episode {number}: {written.output:.200}")
    await _check(session, "python3 answer.py", f"{number}\n")
    shown = await session.python("import threading; threading.get_ident() > 0", timeout_s=TIMEOUT_S)
    if shown.output != "True\n":
        raise ValueError(f"episode {number}: Python says {shown.output!r:.200}")
    if number % HANG_EVERY == 0 and not (await session.exec("sleep 600", timeout_s=HANG_S)).timed_out:
        raise ValueError(f"episode {number}: a command outlived its time")


async def _check(session: SandboxSession, command: str, expected: str) -> None:
    result = await session.exec(command, timeout_s=TIMEOUT_S)
    if (result.exit_code, result.output) != (0, expected):
        raise ValueError(f"{command!r} ended with {result.exit_code}: {result.output!r:.200}")


async def soak(backend: Backend, data_dir: Path, *, episodes: int, at_once: int) -> tuple[Held, Held]:
    """What is held after WARM_UP episodes, and after all of them."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(at_once))
    # Or one of its threads might be needed late, and look like a leak.
    all_started = threading.Barrier(at_once)
    await asyncio.gather(*(asyncio.to_thread(all_started.wait) for _ in range(at_once)))
    with Progress(console=Console(stderr=True)) as progress:
        shown = progress.add_task("episodes", total=WARM_UP + episodes)
        numbers = iter(range(1, WARM_UP + episodes + 1))

        async def player(limit: int) -> None:
            for number in numbers:
                await play(backend, number)
                progress.advance(shown)
                if number > limit - at_once:
                    return

        await asyncio.gather(*(player(WARM_UP) for _ in range(at_once)))
        before = held(data_dir)
        await asyncio.gather(*(player(WARM_UP + episodes) for _ in range(at_once)))
        return before, held(data_dir)


def held(data_dir: Path) -> Held:
    """Now, between two episodes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        fds=_num_entries("/proc/self/fd"),
        threads=_num_entries("/proc/self/task"),
        processes=_num_descendants(),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        namespaces=_num_namespaces(),
        files=sum(1 for path in data_dir.rglob("*") if not path.is_dir()),
        cgroups=sum(1 for _ in Path("/sys/fs/cgroup").glob("**/*rollmill*")),
        mib=resident / 2**20,
    )


def _num_entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _num_namespaces() -> int:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns"):
        with suppress(OSError):
            found |= {(path / kind).readlink() for kind in ("pid", "mnt")}
    return len(found)


def _num_descendants() -> int:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= more
        grown = bool(more)
    return len(ours) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 = something grew, or a sandbox failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox_soak", description=__doc__)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kind", choices=["bubblewrap", "docker", "subprocess"], default="bubblewrap")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        try:
            given = load_settings().model_copy(update={"data_dir": data_dir, "sandbox": arguments.kind})
            backend = open_backend(given)
            before, after = asyncio.run(soak(backend, data_dir, episodes=arguments.episodes, at_once=arguments.at_once))
        except (RollmillError, ValueError) as error:
            print(f"sandbox_soak: {error}")
            return 1
    growth = {field.name: getattr(after, field.name) - getattr(before, field.name) for field in fields(Held)}
    grown = [name for name, by in growth.items() if by > (MAX_GROWTH_MIB if name == "mib" else 0)]
    for name in grown:
        print(f"{name}: {getattr(before, name)} after {WARM_UP} episodes, {getattr(after, name)} at the end")
    figures = " ".join(f"{name}=+{by:.1f}" if name == "mib" else f"{name}={by:+d}" for name, by in growth.items())
    print(f"sandbox_soak: kind={arguments.kind} episodes={arguments.episodes} grown={len(grown)} {figures}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
