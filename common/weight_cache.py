"""Folders of versions on this machine: engines load folders, wherever the trainer publishes.

A version in a shared folder is checked where it lies. One behind a URL is fetched into the cache, once for all
processes of the machine, whole or not at all; the weight keeper then has engines load it from there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from common.object_store import fetch
from common.weights import WeightsDamaged, WeightsUnavailable, folder_of, is_url, verify

logger = logging.getLogger(__name__)

NUM_KEPT = 3
"""Versions that stay in the cache even if nobody names them."""
LOCK_WAIT_S = 900.0
"""How long another process may take to fetch, before this one reports that it can't have the version."""
LOCK_POLL_S = 0.1


class WeightCache:
    """The cache of one database's runs, in a folder that keepers and engines of this machine see under one path."""

    def __init__(self, root: Path, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._root = root
        self._lock_wait_s = lock_wait_s

    def place(self, location: str, manifest_sha256: str) -> Path:
        """Where a version's folder is, or will be once `folder` has brought it here."""
        if not is_url(location):
            return folder_of(location)
        # By content: a number that is published anew never changes a folder that an engine has loaded from.
        return self._root / f"{location.rpartition('/')[2].partition('-')[0]}-{manifest_sha256[:32]}"

    def folder(self, location: str, manifest_sha256: str, *, named: Callable[[], Collection[str]]) -> Path:
        """A version's folder, whole and checked, that engines of this machine can load.

        `named` gives the manifest hashes of the versions that engines serve or load; those stay in the cache.
        Waits for another process that fetches, and for the store. Raises WeightsDamaged and WeightsUnavailable.
        """
        target = self.place(location, manifest_sha256)
        if not is_url(location):
            verify(target, manifest_sha256)
            return target
        try:
            with self._alone():
                if not _is_whole(target, manifest_sha256):
                    self._fetch(location, manifest_sha256, target)
                os.utime(target)
                self._prune(target, keep={sha256[:32] for sha256 in named()})
        except OSError as error:
            raise WeightsUnavailable(f"weight cache {self._root}: {error}") from error
        return target

    def _fetch(self, location: str, manifest_sha256: str, target: Path) -> None:
        started = time.monotonic()
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=self._root))
        try:
            fetch(location, manifest_sha256, draft)
            draft.chmod(0o755)
            if target.exists():
                shutil.rmtree(target)
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        logger.info("weights fetched folder=%s took_s=%.1f", target, time.monotonic() - started)

    def _prune(self, newest: Path, *, keep: set[str]) -> None:
        """Called alone: a draft is then one of a process that was killed."""
        entries = {entry: entry.stat().st_mtime for entry in self._root.iterdir() if entry.is_dir()}
        whole = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entries[entry])
        spared = {newest, *whole[-NUM_KEPT:], *(entry for entry in whole if entry.name.partition("-")[2] in keep)}
        for entry in entries.keys() - spared:
            shutil.rmtree(entry)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the cache's lock, which the kernel takes from a process that dies. Waits for it, `lock_wait_s` long."""
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / "lock").open("a") as file:
            self._lock(file)
            yield

    def _lock(self, file: IO[str]) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WeightsUnavailable(
                        f"another process holds {file.name} for {self._lock_wait_s:g} s, fetching a version"
                    ) from None
                time.sleep(LOCK_POLL_S)
            else:
                return


def _is_whole(folder: Path, manifest_sha256: str) -> bool:
    """Looks at every byte: a cache's disk fails as any other."""
    if not folder.exists():
        return False
    try:
        verify(folder, manifest_sha256)
    except WeightsDamaged as error:
        logger.warning("fetching again: %s", error)
        return False
    return True
