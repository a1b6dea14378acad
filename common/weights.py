"""Weight versions in a shared folder: `weights/<run>/000007` holds safetensors and a manifest, whole or not at all.

The trainer publishes, then commits the `policy_version` row; weight keepers verify and load. Other stores behind the
same protocol are in object_store.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import RollmillError

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
"""In the folder of a version that is a LoRA adapter, beside its weights: the names that PEFT and vLLM know."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LOADING = "loading"
"""An engine's version while weights are exchanged. No run's: whatever dies in between, no token gets a wrong one."""
_ENTRY = re.compile(r"(?P<draft>\.draft-)?(?P<number>[0-9]{6,})(?(draft)-.+)")
"""Name of a version's folder, or of one that is being written."""


class WeightsError(RollmillError):
    """A version can't be had from its store. No engine is to blame, and what is served goes on being served."""


class WeightsDamaged(WeightsError):
    """A version is not what its manifest says. The message names the file and both values."""


class WeightsUnavailable(WeightsError):
    """The store does not answer, or refuses; trying again may help. The message names it and what it said."""


class FileEntry(BaseModel):
    """What a file of the version must look like."""

    model_config = ConfigDict(frozen=True)
    sha256: str
    size_bytes: int


class TensorEntry(BaseModel):
    """What a tensor of the version must look like."""

    model_config = ConfigDict(frozen=True)
    shape: tuple[int, ...]
    dtype: str
    """safetensors' own name: F32, F16, BF16 …"""


class Manifest(BaseModel):
    """All files of a version and all tensors in them."""

    model_config = ConfigDict(frozen=True)
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A version that lies in the store, whole."""

    location: str
    """Path of its folder, or the URL below which its objects lie."""
    manifest_sha256: str

    @property
    def path(self) -> Path:
        """Its folder, where the store is one."""
        return folder_of(self.location)


def version_name(run: str, number: int) -> str:
    """The name under which an engine serves a version, and its path below the store's root."""
    return f"{run}/{number:06d}"


def parse_version_name(name: str) -> tuple[str, int] | None:
    """(run, number) of a name made by `version_name`; None for any other, such as an engine's start weights."""
    run, _, number = name.rpartition("/")
    return (run, int(number)) if run and number.isdigit() else None


def is_start_name(name: str) -> bool:
    """Whether an engine whose weights have this name still has those that it was started with."""
    return name != LOADING and parse_version_name(name) is None


def is_url(location: str) -> bool:
    """Whether a version lies in an object store, and is fetched before engines load it."""
    return "://" in location


def folder_of(location: str) -> Path:
    """The folder of a version that lies in one."""
    assert not is_url(location), f"{location} is no folder"
    return Path(location)


class VersionStore(Protocol):
    """Where the trainer publishes. Its methods raise WeightsUnavailable when it does not answer."""

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        """Let `write` fill an empty folder, then make its content the version, whole or not at all.

        Publishing a number again is allowed: what was there can only come from a step that was never marked done.
        """

    def check(self, location: str, manifest_sha256: str) -> None:
        """Raise WeightsDamaged unless engines can load the version that lies there."""

    def prune(self, run: str, *, keep_from: int, keep: Collection[int] = ()) -> list[int]:
        """Delete the run's versions below `keep_from`, but for 0 and those of `keep`; returns their numbers.

        Deletes also what publishing versions that old left behind when it was killed.
        """

    def sweep(self, run: str) -> None:
        """Delete all that publishing left behind when it was killed. Nothing may be publishing the run meanwhile."""


class WeightStore:
    """Versions below one folder that the trainer and the engines share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, run: str, number: int) -> Path:
        return self.root / version_name(run, number)

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        """Let `write` fill an empty draft folder, then make it the version: manifest, fsync, rename."""
        target = self.path(run, number)
        _make_folder(target.parent)
        draft = Path(tempfile.mkdtemp(prefix=f".draft-{number:06d}-", dir=target.parent))
        try:
            write(draft)
            manifest = describe(draft).model_dump_json(indent=1).encode()
            (draft / MANIFEST).write_bytes(manifest)
            draft.chmod(0o755)
            fsync_folder(draft)
            if target.exists():
                shutil.rmtree(target)
            draft.rename(target)
            fsync(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return Published(location=str(target), manifest_sha256=hashlib.sha256(manifest).hexdigest())

    def check(self, location: str, manifest_sha256: str) -> None:
        """Read all of the version. Raises WeightsDamaged."""
        if is_url(location):
            raise WeightsDamaged(f"{location} does not lie in folder {self.root}, where versions now belong")
        verify(Path(location), manifest_sha256)

    def prune(self, run: str, *, keep_from: int, keep: Collection[int] = ()) -> list[int]:
        """Delete old versions and drafts; see VersionStore."""
        doomed = {}
        for entry in (self.root / run).iterdir():
            found = _ENTRY.fullmatch(entry.name)
            if found is None:
                continue
            number, is_draft = int(found["number"]), found["draft"] is not None
            if number < keep_from and (is_draft or (number > 0 and number not in keep)):
                doomed[entry] = None if is_draft else number
        for entry in doomed:
            shutil.rmtree(entry)
        return sorted(number for number in doomed.values() if number is not None)

    def sweep(self, run: str) -> None:
        """Delete drafts; see VersionStore."""
        for draft in (self.root / run).glob(".draft-*"):
            shutil.rmtree(draft)

    def numbers(self, run: str) -> list[int]:
        """Of the versions that are there, in order."""
        found = [_ENTRY.fullmatch(entry.name) for entry in (self.root / run).glob("[0-9]*")]
        return sorted(int(entry["number"]) for entry in found if entry)


def describe(folder: Path) -> Manifest:
    """Manifest of the files that lie in a folder now."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        files[path.name] = FileEntry(sha256=_sha256(path), size_bytes=path.stat().st_size)
        if path.suffix == ".safetensors":
            tensors.update(read_safetensors_header(path))
    return Manifest(files=files, tensors=tensors)


def verify(folder: Path, manifest_sha256: str) -> Manifest:
    """Check a version's folder against its manifest, and the manifest against the database's hash.

    Raises WeightsDamaged that names the file, what it should be and what it is.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise WeightsDamaged(f"{folder / MANIFEST} cannot be read: {error.strerror}") from None
    manifest = parse_manifest(raw, manifest_sha256, what=str(folder / MANIFEST))
    for name, entry in manifest.files.items():
        _verify_file(folder / name, entry)
    return manifest


def parse_manifest(raw: bytes, manifest_sha256: str, *, what: str) -> Manifest:
    """The manifest in these bytes. Raises WeightsDamaged unless they are those that the database vouches for."""
    check_sha256(hashlib.sha256(raw).hexdigest(), manifest_sha256, what=what)
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsDamaged(f"{what} is not a manifest: {error.errors()[0]['msg']}") from None


def check_size(size_bytes: int, entry: FileEntry, *, what: str) -> None:
    """Raise WeightsDamaged unless a file is as long as it was published."""
    if size_bytes != entry.size_bytes:
        raise WeightsDamaged(f"{what} has {size_bytes} bytes, published were {entry.size_bytes}")


def check_sha256(found: str, published: str, *, what: str) -> None:
    """Raise WeightsDamaged unless a file's bytes are those that were published."""
    if found != published:
        raise WeightsDamaged(f"{what} has sha256 {found[:12]}…, published was {published[:12]}…")


def _verify_file(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise WeightsDamaged(f"{path} cannot be read: {error.strerror}") from None
    check_size(size, entry, what=str(path))
    check_sha256(_sha256(path), entry.sha256, what=str(path))


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Names, shapes and dtypes of the tensors in a file. Raises WeightsDamaged when it is no safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        raw = file.read(length) if 0 < length <= path.stat().st_size else b""
    try:
        header = json.loads(raw)
    except ValueError:
        raise WeightsDamaged(f"{path} is no safetensors file, or is cut short") from None
    return {
        name: TensorEntry(shape=tuple(entry["shape"]), dtype=entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_folder(folder: Path) -> None:
    """Make it, with those above it, so that it is still there after a power loss."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Have the disk hold what was written to a file, or renamed in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """`fsync` of a folder and of the files in it."""
    for path in folder.iterdir():
        fsync(path)
    fsync(folder)
