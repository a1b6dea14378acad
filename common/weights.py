"""Weight versions on a shared folder: `weights/<run>/000007` holds safetensors and a manifest, whole or not at all.

The trainer publishes, then commits the `policy_version` row; weight keepers verify and load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import RollmillError

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
"""In the folder of a version that is a LoRA adapter, beside its weights: the names that PEFT and vLLM know."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightsDamaged(RollmillError):
    """A version's folder does not match its manifest. The message names the file and both values."""


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
    """A version that lies on the store, whole."""

    path: Path
    manifest_sha256: str


def version_name(run: str, number: int) -> str:
    """The name under which an engine serves a version, and its path below the store's root."""
    return f"{run}/{number:06d}"


def parse_version_name(name: str) -> tuple[str, int] | None:
    """(run, number) of a name made by `version_name`; None for any other, such as an engine's start weights."""
    run, _, number = name.rpartition("/")
    return (run, int(number)) if run and number.isdigit() else None


class WeightStore:
    """Versions below one folder that the trainer and the engines share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, run: str, number: int) -> Path:
        return self.root / version_name(run, number)

    def publish(self, run: str, number: int, write: Callable[[Path], None]) -> Published:
        """Let `write` fill an empty draft folder, then make it the version: manifest, fsync, rename.

        An existing folder of the same number is replaced: it can only come from a step that was never marked done.
        """
        target = self.path(run, number)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".draft-{number:06d}-", dir=target.parent))
        try:
            write(draft)
            manifest = describe(draft).model_dump_json(indent=1).encode()
            (draft / MANIFEST).write_bytes(manifest)
            draft.chmod(0o755)
            _fsync_folder(draft)
            if target.exists():
                shutil.rmtree(target)
            draft.rename(target)
            _fsync(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return Published(path=target, manifest_sha256=hashlib.sha256(manifest).hexdigest())

    def prune(self, run: str, *, keep_from: int) -> list[int]:
        """Delete the versions of a run below `keep_from`, except 0; returns their numbers."""
        folder = self.root / run
        numbers = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        doomed = [number for number in numbers if 0 < number < keep_from]
        for number in doomed:
            shutil.rmtree(self.path(run, number))
        return doomed


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
    found = hashlib.sha256(raw).hexdigest()
    if found != manifest_sha256:
        raise WeightsDamaged(f"{folder / MANIFEST} has sha256 {found[:12]}…, published was {manifest_sha256[:12]}…")
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsDamaged(f"{folder / MANIFEST} is not a manifest: {error.errors()[0]['msg']}") from None
    for name, entry in manifest.files.items():
        _verify_file(folder / name, entry)
    return manifest


def _verify_file(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise WeightsDamaged(f"{path} cannot be read: {error.strerror}") from None
    if size != entry.size_bytes:
        raise WeightsDamaged(f"{path} has {size} bytes, published were {entry.size_bytes}")
    found = _sha256(path)
    if found != entry.sha256:
        raise WeightsDamaged(f"{path} has sha256 {found[:12]}…, published was {entry.sha256[:12]}…")


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


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_folder(folder: Path) -> None:
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)
