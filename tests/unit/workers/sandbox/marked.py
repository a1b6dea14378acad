"""Processes of the machine that carry a mark in their command line."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from pathlib import Path

MARK = os.environ.setdefault("TEST_MARK", f"marked-{secrets.token_hex(4)}")
"""Of this process and those that it starts: other tests may run on the machine at the same time."""


def running(mark: str = MARK) -> list[int]:
    """Live processes with the mark, but for the Python programs that were told to use it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            if mark.encode() in command and b"import asyncio" not in command and b"pytest" not in command:
                found.append(int(path.parent.name))
    return found


async def until_running() -> None:
    async with asyncio.timeout(20):
        while not running():  # noqa: ASYNC110 - another process is the event
            await asyncio.sleep(0.01)


async def until_gone() -> None:
    async with asyncio.timeout(20):
        while running():  # noqa: ASYNC110 - another process is the event
            await asyncio.sleep(0.002)


def user_of(pid: int) -> int:
    """The user that a process runs as, in the machine's numbers."""
    return int(Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0])
