"""Weight versions in an object store behind a URL (s3://…, gs://…, memory://…, file://…), through fsspec.

A version is `<url>/<run>/000007-1a2b3c4d/`: its files, and last its manifest. Objects can't be renamed, so what makes
it a version is the manifest's sha256 in the `policy_version` row. Keepers fetch it into a cache (weight_cache.py).
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from common.errors import RollmillError, SetupError
from common.settings import masked
from common.weights import (
    MANIFEST,
    FileEntry,
    Manifest,
    Published,
    VersionStore,
    WeightsDamaged,
    WeightStore,
    WeightsUnavailable,
    check_sha256,
    check_size,
    describe,
    is_url,
    parse_manifest,
    version_name,
)

logger = logging.getLogger(__name__)

NUM_STREAMS = 4
"""Files of a version that are sent or fetched at a time: one stream rarely fills a network."""
CHUNK_BYTES = 8 << 20
_ENTRY = re.compile(r"(?P<number>[0-9]{6,})-[0-9a-f]+")


def open_store(url: str | None, *, folder: Path) -> VersionStore:
    """The store that the setting names; None = the folder. Raises SetupError for a URL that nothing here can open."""
    if url is None:
        return WeightStore(folder)
    try:
        return ObjectStore(url)
    except (ImportError, ValueError) as error:
        raise SetupError(f"ROLLMILL_WEIGHTS_URL={masked(url)}: {error}") from error


class ObjectStore:
    """Versions below one URL. Its credentials, endpoint and time limits are the driver's, from its own environment."""

    def __init__(self, url: str) -> None:
        """Raises ImportError when the URL's driver is not installed, ValueError when there is none for it."""
        self.url = url.rstrip("/")
        # A driver that remembers listings would not see what other processes write.
        self._files, self._root = url_to_fs(self.url, use_listings_cache=False)

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        """Files first, manifest last; see VersionStore. The same bytes get the same location, and no others do."""
        with tempfile.TemporaryDirectory(prefix="rollmill-weights-") as name:
            draft = Path(name)
            write(draft)
            described = describe(draft)
            manifest = described.model_dump_json(indent=1).encode()
            sha256 = hashlib.sha256(manifest).hexdigest()
            entry = f"{version_name(run, number)}-{sha256[:8]}"
            with _reaching(self.url):
                self._files.makedirs(f"{self._root}/{entry}", exist_ok=True)
                with ThreadPoolExecutor(NUM_STREAMS) as threads:
                    for _ in threads.map(
                        lambda file: self._files.put_file(str(draft / file), f"{self._root}/{entry}/{file}"),
                        described.files,
                    ):
                        pass
                self._files.pipe_file(f"{self._root}/{entry}/{MANIFEST}", manifest)
        return Published(location=f"{self.url}/{entry}", manifest_sha256=sha256)

    def check(self, location: str, manifest_sha256: str) -> None:
        """The manifest and the size of every file. Their content is checked by whoever fetches them."""
        if not location.startswith(self.url + "/"):
            raise WeightsDamaged(f"{masked(location)} does not lie below {masked(self.url)}, where versions now belong")
        _, manifest = _manifest(location, manifest_sha256)
        for name, entry in manifest.files.items():
            with _reaching(f"{location}/{name}"):
                size: int = self._files.info(f"{self._path(location)}/{name}")["size"]
                check_size(size, entry, what=f"{masked(location)}/{name}")

    def prune(self, run: str, *, keep_from: int, keep: Collection[int] = ()) -> list[int]:
        """Delete old versions, each from its manifest on, so that no half of one passes for whole."""
        doomed: dict[str, int] = {}
        with _reaching(self.url):
            for path in self._files.ls(f"{self._root}/{run}", detail=False):
                found = _ENTRY.fullmatch(path.rstrip("/").rpartition("/")[2])
                number = int(found["number"]) if found else 0
                if 0 < number < keep_from and number not in keep:
                    doomed[path] = number
            for path in doomed:
                if self._files.exists(f"{path}/{MANIFEST}"):
                    self._files.rm_file(f"{path}/{MANIFEST}")
                self._files.rm(path, recursive=True)
        return sorted(set(doomed.values()))

    def sweep(self, run: str) -> None:
        """Nothing: objects without a manifest are no version, and are written over or pruned as one."""

    def _path(self, location: str) -> str:
        return f"{self._root}{location.removeprefix(self.url)}"


def fetch(location: str, manifest_sha256: str, draft: Path) -> None:
    """Copy a version into an empty folder, checking every byte on its way.

    Raises WeightsDamaged that names the object, and WeightsUnavailable; what lies in the folder is then of no use.
    """
    raw, manifest = _manifest(location, manifest_sha256)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        for _ in threads.map(lambda item: _fetch_file(location, draft, *item), manifest.files.items()):
            pass
    (draft / MANIFEST).write_bytes(raw)


def _manifest(location: str, manifest_sha256: str) -> tuple[bytes, Manifest]:
    what = f"{location}/{MANIFEST}"
    with _reaching(what):
        files, path = _open(location)
        raw: bytes = files.cat_file(f"{path}/{MANIFEST}")
    return raw, parse_manifest(raw, manifest_sha256, what=masked(what))


def _fetch_file(location: str, draft: Path, name: str, entry: FileEntry) -> None:
    what = f"{masked(location)}/{name}"
    digest, size = hashlib.sha256(), 0
    with _reaching(what):
        files, path = _open(location)
        with files.open(f"{path}/{name}", "rb") as source, (draft / name).open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                target.write(chunk)
    check_size(size, entry, what=what)
    check_sha256(digest.hexdigest(), entry.sha256, what=what)


def _open(location: str) -> tuple[Any, str]:
    assert is_url(location), f"{location} is no URL"
    files, path = url_to_fs(location, use_listings_cache=False)
    return files, path


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Tell an object that is missing from a store that does not answer. Drivers raise whatever their libraries do."""
    try:
        yield
    except RollmillError:
        raise
    except FileNotFoundError:
        raise WeightsDamaged(f"{masked(what)} is missing") from None
    except Exception as error:
        raise WeightsUnavailable(f"{masked(what)} cannot be reached: {type(error).__name__}: {error}") from error
