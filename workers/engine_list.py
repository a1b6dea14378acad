"""Which engines serve a run, read from the database for all turns of a process at once. Turns are sent there next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.db.engines import EngineRow
from common.episode import EngineState
from common.errors import EpisodeError
from common.outcomes import Outcome

CACHE_S = 0.2
"""How old the list of engines may be, and how often it is read anew while turns wait."""


@dataclass(kw_only=True)
class _Reading:
    """The last reading of a run's engines, perhaps still under way."""

    rows: asyncio.Future[list[EngineRow]]
    started: float
    """Of the list's clock."""


class EngineList:
    """One per process, used from one event loop; a slow database holds up nobody but those who ask."""

    def __init__(self, read: Callable[[int], list[EngineRow]], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`read` reads a run's engines by the run's id; it is called in a thread."""
        self._read_rows = read
        self._clock = clock
        self._readings: dict[int, _Reading] = {}
        self._versions: dict[int, dict[str, int | None]] = {}
        """Run id -> URL -> what the engine served at the last reading."""

    async def urls(self, run_id: int, max_staleness: int, *, version: int | None = None) -> list[str]:
        """Of the engines that take new work, as of CACHE_S ago or later. All who ask share one reading.

        With `version`, those that serve this very one, however old it is.
        """
        now = self._clock()
        reading = self._readings.get(run_id)
        if reading is None or (reading.rows.done() and now - reading.started >= CACHE_S):
            future = asyncio.ensure_future(asyncio.to_thread(self._read_rows, run_id))
            reading = self._readings[run_id] = _Reading(rows=future, started=now)
        rows = await asyncio.shield(reading.rows)
        self._versions[run_id] = {row.url: row.version for row in rows}
        if version is None:
            return fresh_enough(rows, max_staleness)
        return [row.url for row in rows if row.state is EngineState.SERVING and row.version == version]

    def version(self, run_id: int, url: str) -> int | None:
        """What an engine served when the run's list was read last; None = it was not there."""
        return self._versions.get(run_id, {}).get(url)

    async def urls_by(
        self, deadline: float, run_id: int, max_staleness: int, *, version: int | None = None
    ) -> list[str]:
        """The same. Raises EpisodeError(ENGINE_LOST) if the database does not answer by the deadline."""
        try:
            async with asyncio.timeout(max(deadline - self._clock(), CACHE_S)):
                return await self.urls(run_id, max_staleness, version=version)
        except TimeoutError:
            raise EpisodeError(Outcome.ENGINE_LOST, "the list of engines could not be read in time") from None


def fresh_enough(rows: Sequence[EngineRow], max_staleness: int) -> list[str]:
    """URLs of the engines that take new work: serving, and not further behind the newest than the run's bound.

    Samples of an engine that lags more would be dropped as stale as soon as they are complete.
    """
    versions = {row.url: row.version for row in rows if row.state is EngineState.SERVING and row.version is not None}
    newest = max([*versions.values(), *(row.newest or 0 for row in rows)], default=0)
    return [url for url, version in versions.items() if version >= newest - max_staleness]
