"""Brings new policy versions into the engines that this process owns, while they serve.

One keeper lives in each RUN process. Who waits: the keeper waits for an announcement or its next poll; nobody waits
for the keeper. An engine under it is paused only between pause and resume, both of which have time limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

from common.context import needed_context
from common.db import engines, versions
from common.db.engines import EngineRow, Lag
from common.db.session import Database
from common.db.versions import PolicyVersion
from common.errors import DatabaseUnavailable
from common.weight_cache import WeightCache
from common.weights import LOADING, WeightsDamaged, WeightsError, parse_version_name, version_name
from workers import adapters
from workers.engine_client import EngineClient
from workers.engine_errors import (
    ContextTooSmall,
    EngineError,
    EngineUnavailable,
    LoadRefused,
    NotUpYet,
    Superseded,
)

logger = logging.getLogger(__name__)

ENGINE_LEASE_S = 15.0
"""How long an engine stays with a keeper that shows no sign of life."""
QUARANTINE_AFTER = 3
"""Failures in a row, after which an engine gets no new work."""
RESUME_TRIES = 3
RESUME_PAUSE_S = 0.2


class WeightKeeper:
    """One per process, run on the event loop that the client belongs to."""

    def __init__(
        self,
        database: Database,
        client: EngineClient,
        *,
        owner: str,
        poll_s: float,
        cache: WeightCache,
        lease_s: float = ENGINE_LEASE_S,
    ) -> None:
        self._database = database
        self._client = client
        self._owner = owner
        self._poll_s = poll_s
        self._cache = cache
        self._lease_s = lease_s
        self._owned_until = 0.0
        """Of time.monotonic."""
        self._announced = asyncio.Event()
        self._num_announced = 0
        self._tending: dict[int, asyncio.Task[None]] = {}
        """Engine id -> the task that alone talks to it."""
        self._verified: dict[int, tuple[PolicyVersion, Path]] = {}
        """Run id -> the version that was checked last, and its folder here."""
        self._verifying = asyncio.Lock()
        self._troubles: dict[object, str] = {}
        """Engine id, or ("lag", engine id) -> what was logged of it last."""

    def announce(self) -> None:
        """Look for new versions now. Call it on the loop's thread."""
        self._num_announced += 1
        self._announced.set()

    async def run(self) -> None:
        """Keep the engines up to date until cancelled; whatever is paused then is resumed first."""
        try:
            while True:
                self._announced.clear()
                await self._poll()
                try:
                    async with asyncio.timeout(self._poll_s):
                        await self._announced.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._tending.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        """Renew the ownership, also of engines that are being loaded, and look after those that nobody looks after."""
        asked = time.monotonic()
        try:
            rows = await asyncio.to_thread(self._own)
        except DatabaseUnavailable as error:
            self._report(None, f"no weights are loaded while the database is away: {error}")
            return
        except Exception:
            logger.exception("weight keeper cannot read its engines")
            return
        self._report(None, None)
        self._owned_until = asked + self._lease_s
        for row in rows:
            if row.id not in self._tending:
                self._tending[row.id] = asyncio.create_task(self._tend(row))

    async def _tend(self, engine: EngineRow) -> None:
        try:
            while True:
                heard = self._num_announced
                loaded = await self._bring_up_to_date(engine)
                engine = replace(engine, answered=True)
                # A version announced in the meantime may have come too late for this look at the database.
                if not loaded and heard == self._num_announced:
                    break
            self._report(engine.id, None)
        except WeightsError as error:
            await self._lacks_weights(engine, error)
        except LoadRefused as error:
            await self._failed(engine, error, quarantine_after=QUARANTINE_AFTER, known=True)
        except ContextTooSmall as error:
            await self._failed(engine, error, quarantine_after=1, known=False)
        except EngineError as error:
            await self._failed(engine, error, quarantine_after=QUARANTINE_AFTER, known=False)
        except DatabaseUnavailable as error:
            self._report(engine.id, f"weights not loaded engine={engine.url}: the database is away: {error}")
        except Exception:
            logger.exception("weight keeper failed engine=%s", engine.url)
        finally:
            del self._tending[engine.id]

    async def _bring_up_to_date(self, engine: EngineRow) -> bool:
        """Make the engine serve the version that its run wants; True if it was loaded, and so may be outdated again."""
        await self._check_health(engine)
        name = await self._client.weight_version(engine.url)
        paused = await self._client.is_paused(engine.url)
        target = await asyncio.to_thread(self._wanted, engine.run_id)
        if target is not None:
            await self._check_context(engine, target)
        if target is not None and target.adapters_kept is not None:
            if paused:
                await self._resume_forgotten(engine)
            return await self._bring_adapter(engine, target, base=name)
        served = _served(name, target)
        if target is None or served == target.number:
            if paused:
                await self._resume_forgotten(engine)
            await self._serves_well(engine, served, num_loads=0)
            return False
        if served != engine.version:
            await asyncio.to_thread(self._serves, engine, served)
        claim = await asyncio.to_thread(self._starts_loading, engine, target.number)
        if claim is None:
            return False  # Somebody else took the engine, and loads it now.
        try:
            folder = await self._verify(target)
        except WeightsError:
            if paused:
                await self._resume_forgotten(engine)
            raise
        await self._load(engine, target, folder, name, claim=claim)
        await self._serves_well(engine, target.number, num_loads=1)
        return True

    async def _check_context(self, engine: EngineRow, target: PolicyVersion) -> None:
        """Raise ContextTooSmall. At each look, and so before a load: a server that was started anew with another
        context serves start weights, of which no token is kept."""
        needed = await asyncio.to_thread(needed_context, target.model, target.max_row_tokens)
        if needed is not None and (lack := needed.lack(await self._client.context(engine.url))):
            raise ContextTooSmall(f"engine {engine.url} {lack}")

    async def _check_health(self, engine: EngineRow) -> None:
        try:
            await self._client.check_health(engine.url)
        except EngineUnavailable as error:
            if engine.answered:
                raise
            raise NotUpYet(str(error)) from error

    async def _bring_adapter(self, engine: EngineRow, target: PolicyVersion, *, base: str) -> bool:
        """The same for a run that trains an adapter."""
        place = self._cache.place(target.location, target.manifest_sha256)
        held = await adapters.held(self._client, engine.url, target, folder=place, base=base)
        is_new = target.number not in held.numbers
        if is_new:
            if held.newest != engine.version:
                await asyncio.to_thread(self._serves, engine, held.newest)
            if await asyncio.to_thread(self._starts_loading, engine, target.number) is None:
                return False  # Somebody else took the engine, and loads it now.
            folder = await self._verify(target)
            await adapters.load(self._client, engine.url, target, folder=folder, foreign=held.foreign)
        await self._serves_well(engine, target.number, num_loads=int(is_new))
        await adapters.unload_old(self._client, engine.url, target, numbers=held.numbers)
        return is_new

    async def _serves_well(self, engine: EngineRow, version: int | None, *, num_loads: int) -> None:
        await asyncio.to_thread(self._loaded, engine, version, num_loads)
        self._report(("lag", engine.id), None)

    async def _load(self, engine: EngineRow, target: PolicyVersion, folder: Path, old_name: str, *, claim: int) -> None:
        """Pause, exchange, name, resume. Resumes whatever happens, unless the engine is out of reach or another's."""
        started = time.monotonic()
        new_name = version_name(target.run, target.number)
        client, url = self._client, engine.url
        try:
            await client.pause(url, in_flight=target.in_flight, claim=claim)
            await client.update_weight_version(url, LOADING, claim=claim)
            try:
                await client.load_version(url, folder, new_name, claim=claim)
            except LoadRefused:
                await client.update_weight_version(url, old_name, claim=claim)
                raise
            if time.monotonic() > self._owned_until:
                # Another keeper may be loading something newer by now; the name is left to it.
                raise EngineError(f"engine {url}: loading {new_name} took longer than its ownership lasted")
            if not await client.is_paused(url):
                # Somebody without a claim resumed it. What ran since left keys and values of the old weights behind.
                await client.pause(url, in_flight=target.in_flight, claim=claim)
            await client.update_weight_version(url, new_name, claim=claim)
        finally:
            await self._resume(url, claim)
        if (found := await client.weight_version(url)) != new_name:
            raise EngineError(f"engine {url}: {new_name} was loaded, and somebody has named it {found} since")
        took_ms = 1000 * (time.monotonic() - started)
        logger.info("weights loaded engine=%s version=%s took_ms=%.0f", engine.url, new_name, took_ms)

    async def _resume(self, url: str, claim: int) -> None:
        for _ in range(RESUME_TRIES - 1):
            try:
                await self._client.resume(url, claim=claim)
            except Superseded:
                raise
            except EngineError:
                await asyncio.sleep(RESUME_PAUSE_S)
            else:
                return
        await self._client.resume(url, claim=claim)

    async def _resume_forgotten(self, engine: EngineRow) -> None:
        claim = await asyncio.to_thread(self._claim, engine)
        if claim is None:
            return  # Its new owner paused it.
        logger.warning("engine was left paused, by a keeper that died or by hand; resuming it engine=%s", engine.url)
        await self._resume(engine.url, claim)

    async def _verify(self, target: PolicyVersion) -> Path:
        """The version's folder here: fetched and checked once for all engines, before any of them is paused."""
        async with self._verifying:
            verified = self._verified.get(target.run_id)
            if verified is None or verified[0] != target or not verified[1].exists():
                folder = await asyncio.to_thread(self._folder, target)
                verified = self._verified[target.run_id] = (target, folder)
            return verified[1]

    async def _lacks_weights(self, engine: EngineRow, error: WeightsError) -> None:
        self._report(engine.id, f"weights not loaded engine={engine.url}: {error}")
        try:
            lag = await asyncio.to_thread(self._store_lack, engine, error)
        except DatabaseUnavailable:
            return  # The next poll finds the engine as it is.
        self._report_lag(engine, lag)

    async def _failed(self, engine: EngineRow, error: Exception, *, quarantine_after: int, known: bool) -> None:
        """`known`: whether the engine still serves what the database says."""
        if isinstance(error, NotUpYet):
            self._report(engine.id, f"engine does not answer yet engine={engine.url}", level=logging.WARNING)
        else:
            self._report(engine.id, f"weights not loaded engine={engine.url}: {error}")
        try:
            lag = await asyncio.to_thread(self._store_failure, engine, error, quarantine_after, known)
        except DatabaseUnavailable:
            return  # The next poll finds the engine as it is.
        self._report_lag(engine, lag)

    def _report_lag(self, engine: EngineRow, lag: Lag | None) -> None:
        if lag is not None:
            behind = f"serves={lag.version} newest={lag.newest} max_staleness={lag.max_staleness}"
            self._report(
                ("lag", engine.id), f"engine gets no new work, it is too far behind engine={engine.url} {behind}"
            )

    def _report(self, key: object, trouble: str | None, *, level: int = logging.ERROR) -> None:
        """Log when the trouble changes, once, and when it is over. Key None is the database's."""
        before = self._troubles.get(key)
        if trouble is not None and trouble != before:
            logger.log(level, "%s", trouble)
            self._troubles[key] = trouble
        elif trouble is None and before is not None:
            logger.warning("over: %s", before)
            del self._troubles[key]

    # What follows runs in threads.

    def _own(self) -> list[EngineRow]:
        with self._database.begin() as conn:
            return engines.own(conn, self._owner, lease_s=self._lease_s)

    def _wanted(self, run_id: int) -> PolicyVersion | None:
        with self._database.begin() as conn:
            return versions.wanted(conn, run_id)

    def _loaded(self, engine: EngineRow, version: int | None, num_loads: int) -> None:
        with self._database.begin() as conn:
            engines.loaded(
                conn,
                engine.id,
                owner=self._owner,
                version=version,
                num_loads=num_loads,
                wire=self._client.wire(engine.url),
            )

    def _serves(self, engine: EngineRow, version: int | None) -> None:
        with self._database.begin() as conn:
            engines.serves(conn, engine.id, owner=self._owner, version=version)

    def _claim(self, engine: EngineRow) -> int | None:
        with self._database.begin() as conn:
            return engines.claim(conn, engine.id, owner=self._owner)

    def _starts_loading(self, engine: EngineRow, version: int) -> int | None:
        with self._database.begin() as conn:
            return engines.starts_loading(conn, engine.id, owner=self._owner, version=version)

    def _folder(self, target: PolicyVersion) -> Path:
        return self._cache.folder(target.location, target.manifest_sha256, named=self._named)

    def _named(self) -> list[str]:
        with self._database.begin() as conn:
            return [version.manifest_sha256 for version in versions.loadable(conn)]

    def _store_lack(self, engine: EngineRow, error: WeightsError) -> Lag | None:
        refused = isinstance(error, WeightsDamaged)
        with self._database.begin() as conn:
            return engines.lacks_weights(conn, engine.id, owner=self._owner, error=str(error), refused=refused)

    def _store_failure(self, engine: EngineRow, error: Exception, quarantine_after: int, known: bool) -> Lag | None:
        with self._database.begin() as conn:
            if not known:
                engines.serves(conn, engine.id, owner=self._owner, version=None)
            return engines.failed(
                conn,
                engine.id,
                owner=self._owner,
                error=str(error),
                quarantine_after=quarantine_after,
                refused=isinstance(error, LoadRefused),
            )


def _served(name: str, target: PolicyVersion | None) -> int | None:
    """The number of the target's run that a name means; None for start weights and other runs."""
    served = parse_version_name(name)
    return served[1] if served and target and served[0] == target.run else None
