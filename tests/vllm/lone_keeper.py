"""A weight keeper that is a process of its own, for tests that kill it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from common.db.session import Database
from common.log import setup_logging
from common.weight_cache import WeightCache
from workers.engine_client import EngineClient
from workers.weight_keeper import WeightKeeper

POLL_S = 0.1
LEASE_S = 1.0
"""So that an engine of a dead keeper is taken over soon."""
END_TIMEOUT_S = 10.0


def keep(database_url: str, owner: str, folder: str) -> None:
    """The whole life of the process."""
    setup_logging("INFO")
    asyncio.run(_keep(database_url, owner, folder))


async def _keep(database_url: str, owner: str, folder: str) -> None:
    database = Database.connect(database_url)
    async with EngineClient(timeout_s=60) as client:
        cache = WeightCache(Path(folder))
        await WeightKeeper(database, client, owner=owner, poll_s=POLL_S, cache=cache, lease_s=LEASE_S).run()


@contextmanager
def keepers(database_url: str, folder: Path) -> Iterator[Keepers]:
    """All that are started in the block are dead after it."""
    found = Keepers(database_url, folder)
    try:
        yield found
    finally:
        found.kill_all()


class Keepers:
    """Starts them, in milliseconds: they are forked off a process that has imported what they need."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._database_url = database_url
        self._folder = str(folder)
        """Of the cache."""
        self._started: dict[str, ForkServerProcess] = {}

    def start(self) -> str:
        """Start one more; returns the owner that it is to the database."""
        owner = f"keeper-{len(self._started)}"
        process = self._context.Process(target=keep, args=(self._database_url, owner, self._folder), daemon=True)
        process.start()
        self._started[owner] = process
        return owner

    def kill(self, owner: str) -> None:
        """SIGKILL; returns when it is dead."""
        process = self._started[owner]
        assert process.is_alive(), f"{owner} has ended with exit code {process.exitcode}"
        process.kill()
        process.join(END_TIMEOUT_S)
        assert not process.is_alive()

    def stop(self, owner: str) -> None:
        """SIGSTOP: it does nothing, also not renew what it owns, until `go_on`."""
        self._signal(owner, signal.SIGSTOP)

    def go_on(self, owner: str) -> None:
        self._signal(owner, signal.SIGCONT)

    def _signal(self, owner: str, number: signal.Signals) -> None:
        pid = self._started[owner].pid
        assert pid is not None
        os.kill(pid, number)

    def kill_all(self) -> None:
        for process in self._started.values():
            process.kill()
            process.join(END_TIMEOUT_S)
