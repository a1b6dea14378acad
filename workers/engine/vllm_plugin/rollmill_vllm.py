"""What Rollmill adds to vLLM: exchanging the weights of a running server for those of a version's folder.

vLLM's own processes import this module from PYTHONPATH, in an environment that knows nothing of our packages, so it
stands alone: standard library, torch, safetensors and vLLM. The engine client calls it through /collective_rpc.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

logger = logging.getLogger(f"vllm.{__name__}")
"""Below vLLM's own, which alone has a handler in its processes."""

MANIFEST = "manifest.json"
BACKEND = "rollmill"
"""For --weight-transfer-config, where the official update routes are to be used."""
TIED_HEAD = "lm_head.weight"
SERVED_FROM = {
    torch.float32: frozenset({"F32", "F16", "BF16"}),
    torch.float16: frozenset({"F16", "F32"}),
    torch.bfloat16: frozenset({"BF16", "F32"}),
}
"""Stored types that a server of each type takes: widened exactly, or float32 master weights rounded once."""


class Refused(Exception):
    """The folder can't become the model's weights, and nothing was touched. The message names file and values."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies and what its file's header says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' own name: F32, BF16 …"""


Stored = Mapping[str, StoredTensor]


class WorkerExtension:
    """Mixed into vLLM's worker by --worker-extension-cls; its methods answer /collective_rpc, once a rank."""

    vllm_config: VllmConfig
    model_runner: Any

    def load_version(self, path: str, name: str, claim: str = "0") -> dict[str, object]:
        """Serve the weights in folder `path`: {"ok": true, "version": name, "seconds": …}, or false and "error".

        After an error the old weights serve on. Raises, which the route answers with status 500, when even those
        could not be brought back: then nobody knows what the server has. An older claim than one that it has had is
        refused, and "superseded" says so. 0 = none.
        """
        started = time.perf_counter()
        try:
            loader = loader_of(self.vllm_config, self.model_runner.get_model())
            if superseded := loader.supersedes(int(claim)):
                logger.error("load refused version=%s reason=%s", name, superseded)
                return {"ok": False, "superseded": True, "error": superseded}
            loader.load(Path(path))
        except Refused as error:
            logger.error("weights refused version=%s reason=%s", name, error)
            return {"ok": False, "error": str(error)}
        self.model_runner.reset_lora_state()
        seconds = time.perf_counter() - started
        logger.info("weights loaded version=%s seconds=%.4f", name, seconds)
        return {"ok": True, "version": name, "seconds": seconds}


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A folder needs no rendezvous."""


@dataclass
class FolderUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`update_info` of POST /update_weights."""

    path: str
    """The version's folder, as the server sees it."""


class FolderTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The official start, update and finish routes over the same loader: one update is one whole folder."""

    init_info_cls = NoInitInfo
    update_info_cls = FolderUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing is touched before the folder was checked."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Raises Refused, with the old weights still serving. Not the base's: that one needs an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FolderUpdateInfo) -> None:
        """Check the folder and serve its weights."""
        loader_of(self.vllm_config, self.model).load(Path(update_info.path))

    def finish_weight_update(self) -> None:
        """The update was complete when its call returned."""

    def shutdown(self) -> None:
        """Nothing is held open."""


# vLLM imports the extension before it makes its transfer engine, and has no other hook for backends of others.
WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)


class Loader:
    """Exchanges one rank's weights."""

    def __init__(self, vllm_config: VllmConfig, model: Any) -> None:
        """The folder that the server started with is the measure of all later ones. Raises Refused without it."""
        self._vllm_config = vllm_config
        self._model = model
        self._claim = 0
        """The newest under which it was loaded."""
        self._serving = Path(vllm_config.model_config.model)
        """The folder whose weights the model has."""
        self._tied = bool(getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False))
        try:
            self._expected = self._without_tied_head(read_headers(self._serving))
        except (Refused, OSError) as error:
            raise Refused(
                f"this server did not start from a folder of safetensors, to compare with: {error}"
            ) from error

    def supersedes(self, claim: int) -> str | None:
        """Why a load under this claim comes too late; None = it does not, and is the newest now."""
        if 0 < claim < self._claim:
            return f"claim {claim} is older than {self._claim}"
        self._claim = max(self._claim, claim)
        return None

    def load(self, folder: Path) -> None:
        """Check the folder whole, then serve its weights. Raises Refused; the old weights then serve on."""
        stored = self._checked(folder)
        logger.info("exchanging weights tensors=%d folder=%s", len(stored), folder)
        try:
            self._exchange(stored)
        except Exception as error:
            # Layers that came before the failure have the new weights already.
            logger.exception("loading %s failed half-way; going back to %s", folder, self._serving)
            self._go_back()
            raise Refused(f"{folder} could not be loaded: {type(error).__name__}: {error}") from error
        self._serving = folder

    def _go_back(self) -> None:
        try:
            self._exchange(self._checked(self._serving))
        except Refused as error:
            raise RuntimeError(f"the model has a mixture of weights, and the old ones are gone: {error}") from error

    def _checked(self, folder: Path) -> Stored:
        try:
            found = read_headers(folder)
            check_manifest(folder, found)
            stored = self._without_tied_head(found)
            check_fits(folder, stored, expected=self._expected, serving=self._vllm_config.model_config.dtype)
            check_finite(stored)
        except (OSError, SafetensorError) as error:
            raise Refused(f"{folder} cannot be read: {error}") from error
        return stored

    def _without_tied_head(self, stored: Stored) -> Stored:
        return {name: entry for name, entry in stored.items() if not (self._tied and name == TIED_HEAD)}

    def _exchange(self, stored: Stored) -> None:
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            initialize_layerwise_reload(self._model)
            try:
                self._model.load_weights(read_tensors(stored))
            finally:
                # Also after an error: until then the parameters are placeholders without storage.
                finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """On CPU a linear layer computes with a packed copy, and a tied head is never loaded by its own name."""
        head = getattr(self._model, "lm_head", None)
        if self._tied and head is not None and hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


_loaders: dict[int, Loader] = {}
"""id of a model that lives as long as its process -> its loader: both ways in must agree on what is served."""


def loader_of(vllm_config: VllmConfig, model: Any) -> Loader:
    """The model's loader, made at its first use. Raises Refused where the start folder is none of safetensors."""
    if id(model) not in _loaders:
        _loaders[id(model)] = Loader(vllm_config, model)
    return _loaders[id(model)]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors in a folder's safetensors files, from their headers. Raises Refused for a file cut short."""
    if not folder.is_dir():
        raise Refused(f"no folder {folder}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused(f"{folder} has no *.safetensors file")
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name in stored:
                raise Refused(f"{file}: tensor {name} also stands in {stored[name].file.name}")
            stored[name] = StoredTensor(file=file, shape=tuple(entry["shape"]), dtype=entry["dtype"])
    return stored


def _header(file: Path) -> dict[str, Any]:
    """Names, shapes, types and places of a file's tensors."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        raw = stream.read(length) if 0 < length <= size else b""
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        ends = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refused(f"{file} is no safetensors file, or its header is cut short") from None
    if size != 8 + length + ends:
        raise Refused(f"{file} has {size} bytes, its header says {8 + length + ends}")
    return header


def check_manifest(folder: Path, stored: Stored) -> None:
    """Compare a version's files with its manifest; a folder without one, such as a base model's, passes."""
    path = folder / MANIFEST
    if not path.exists():
        return
    try:
        manifest = json.loads(path.read_bytes())
        files, tensors = dict(manifest["files"]), dict(manifest["tensors"])
        told = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in tensors.items()}
        sums = {name: (entry["size_bytes"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{path} is no manifest of a version") from None
    if unknown := sorted({entry.file.name for entry in stored.values()} - sums.keys()):
        raise Refused(f"{folder / unknown[0]} is not named in {MANIFEST}")
    found = {name: (entry.shape, entry.dtype) for name, entry in stored.items()}
    if odd := sorted(name for name in told.keys() | found.keys() if told.get(name) != found.get(name)):
        name = odd[0]
        raise Refused(f"{folder}: tensor {name} is {found.get(name)}, {MANIFEST} says {told.get(name)}")
    with ThreadPoolExecutor() as threads:
        # list: what a thread raises comes out with its result.
        list(threads.map(lambda item: _check_file(folder / item[0], *item[1]), sums.items()))


def _check_file(file: Path, size_bytes: int, sha256: str) -> None:
    if not file.is_file():
        raise Refused(f"{file} is missing, though {MANIFEST} names it")
    if file.stat().st_size != size_bytes:
        raise Refused(f"{file} has {file.stat().st_size} bytes, {MANIFEST} says {size_bytes}")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise Refused(f"{file} has sha256 {found[:12]}…, {MANIFEST} says {sha256[:12]}…")


def check_fits(folder: Path, stored: Stored, *, expected: Stored, serving: torch.dtype) -> None:
    """Raise Refused unless the tensors are those of the model that serves, in a type that it can take."""
    if missing := sorted(expected.keys() - stored.keys()):
        raise Refused(f"{folder} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}")
    if unknown := sorted(stored.keys() - expected.keys()):
        raise Refused(f"{folder}: tensor {unknown[0]} is not part of the model that serves")
    for name, entry in stored.items():
        if entry.shape != expected[name].shape:
            raise Refused(f"{folder}: tensor {name} has shape {entry.shape}, the model needs {expected[name].shape}")
        if entry.dtype not in SERVED_FROM.get(serving, frozenset()) and entry.dtype != expected[name].dtype:
            raise Refused(f"{folder}: tensor {name} is {entry.dtype}, which a server in {serving} can't take")


def check_finite(stored: Stored) -> None:
    """Raise Refused for a NaN or an infinite value: the sampler would hang on it or crash."""
    for name, tensor in read_tensors(stored):
        # Both carry a NaN on, and are ten times as fast as asking every value. The engine is paused meanwhile.
        if tensor.numel() and not all(bool(extreme.isfinite()) for extreme in tensor.aminmax()):
            raise Refused(f"{stored[name].file}: tensor {name} holds a NaN or infinite value")


def read_tensors(stored: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, file by file in the order of their names, so that a layer's come together."""
    for file in sorted({entry.file for entry in stored.values()}):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                if name in stored:
                    yield name, opened.get_tensor(name)
