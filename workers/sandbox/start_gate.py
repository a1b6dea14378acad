"""How many sandboxes of a node start at once: an engine that is asked for a hundred at a time answers none in time.

By locked files, since the processes that start them know nothing of each other; a dead one's locks are free at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.errors import EpisodeError
from common.outcomes import Outcome

POLL_S = 0.02
WAIT_S = 120.0


class StartGate:
    """`num_places` places, each a file of the folder."""

    def __init__(self, folder: Path, *, num_places: int) -> None:
        self._folder = folder
        self._num_places = num_places

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, which another start leaves. Raises EpisodeError after WAIT_S."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + WAIT_S
        while (held := self._take()) is None:
            if time.monotonic() > deadline:
                raise EpisodeError(
                    Outcome.SANDBOX_FAILED,
                    f"no place to start a sandbox within {WAIT_S:g} s: {self._num_places} starts at once "
                    "(ROLLMILL_SANDBOX_STARTS), and none of them ends",
                )
            await asyncio.sleep(POLL_S * (0.5 + random.random()))
        try:
            yield
        finally:
            os.close(held)

    def _take(self) -> int | None:
        for number in range(self._num_places):
            handle = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return handle
        return None
