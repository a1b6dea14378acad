"""Reads a Qwen3 checkpoint folder, checked whole before any tensor is handed to the model.

The start-up and every hot-load come through here, so that a damaged folder never reaches the running weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.errors import SetupError
from common.weights import MANIFEST, Manifest, WeightsDamaged, verify

Shapes = dict[str, tuple[int, ...]]
"""Shape of every tensor that a checkpoint must hold, by name."""

_ARCHITECTURE = "Qwen3ForCausalLM"
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
_TIED_HEAD = "lm_head.weight"


def read_config(folder: Path) -> Qwen3Config:
    """Configuration of a checkpoint folder. Raises SetupError where this engine can't serve it."""
    raw = _read_json(folder / "config.json")
    if raw.get("architectures") != [_ARCHITECTURE]:
        raise SetupError(f"{folder} holds {raw.get('architectures')}, this engine serves only {_ARCHITECTURE}")
    try:
        config = Qwen3Config.from_dict(raw)
    except (StrictDataclassError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        raise SetupError(f"{folder / 'config.json'} is not a Qwen3 configuration: {text}") from error
    if small := [name for name in _SIZES if getattr(config, name) is not None and getattr(config, name) < 1]:
        raise SetupError(f"{folder / 'config.json'} has {small[0]} {getattr(config, small[0])}, expected at least 1")
    if config.num_attention_heads % num_kv_heads(config):
        heads = f"{config.num_attention_heads} query heads for {num_kv_heads(config)} key-value heads"
        raise SetupError(f"{folder / 'config.json'} has {heads}, expected a multiple")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise SetupError(f"{folder} uses rope_type {rope_type!r}, this engine knows {', '.join(_ROPE_TYPES)}")
    if "sliding_attention" in (config.layer_types or ()) or config.hidden_act != "silu":
        raise SetupError(f"{folder} uses sliding attention or {config.hidden_act!r}, which this engine lacks")
    return config


def num_kv_heads(config: Qwen3Config) -> int:
    """Key-value heads of a layer; a configuration that names none has one for each query head."""
    return config.num_key_value_heads or config.num_attention_heads


def read_eos_ids(folder: Path, config: Qwen3Config) -> frozenset[int]:
    """Ids that end a sequence: those of config.json and of generation_config.json, where there is one."""
    path = folder / "generation_config.json"
    found = [config.eos_token_id, _read_json(path).get("eos_token_id") if path.exists() else None]
    lists = [[ids] if isinstance(ids, int) else ids or [] for ids in found]
    eos_ids = frozenset(lists[0] + lists[1])
    if unknown := [token_id for token_id in eos_ids if token_id not in range(config.vocab_size)]:
        raise SetupError(f"{folder} names {unknown[0]!r} as eos_token_id, its vocabulary is 0..{config.vocab_size - 1}")
    return eos_ids


def expected_shapes(config: Qwen3Config) -> Shapes:
    """What a checkpoint of this configuration must hold. A tied output head is not asked for."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[_TIED_HEAD]
    return shapes


def read_tensors(folder: Path, shapes: Shapes) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, in float32, whatever float type they are stored in.

    Raises WeightsDamaged that names the difference: a file unlike its manifest entry (where the folder has a
    manifest), a missing, unknown or doubled tensor, another shape, no float type, a NaN or infinite value.
    """
    manifest = verified_manifest(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsDamaged(f"{folder} has no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    try:
        for path in paths:
            if manifest is not None and path.name not in manifest.files:
                raise WeightsDamaged(f"{path} is not named in {MANIFEST}")
            for name, tensor in _checked(path, shapes, manifest):
                if name in tensors:
                    raise WeightsDamaged(f"{path}: tensor {name} stands in two files")
                tensors[name] = tensor
    except (SafetensorError, OSError) as error:
        raise WeightsDamaged(f"{path} cannot be read: {error}") from error
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise WeightsDamaged(f"{folder} lacks {len(missing)} of {len(shapes)} tensors, first {missing[0]}")
    return tensors


def _checked(path: Path, shapes: Shapes, manifest: Manifest | None) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name == _TIED_HEAD and name not in shapes:
                continue
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if name not in shapes:
                raise WeightsDamaged(f"{path}: tensor {name} is not part of this model")
            if shape != shapes[name]:
                raise WeightsDamaged(f"{path}: tensor {name} has shape {shape}, the model needs {shapes[name]}")
            if dtype not in _FLOAT_DTYPES:
                raise WeightsDamaged(f"{path}: tensor {name} is {dtype}, expected one of {_FLOAT_DTYPES}")
            entry = manifest.tensors.get(name) if manifest is not None else None
            if manifest is not None and (entry is None or (entry.shape, entry.dtype) != (shape, dtype)):
                raise WeightsDamaged(f"{path}: tensor {name} is {dtype} {shape}, the manifest says {entry}")
            # A copy: the file is mapped, and the running model must not depend on it.
            tensor = file.get_tensor(name).to(torch.float32, copy=True)
            if not bool(torch.isfinite(tensor).all()):
                raise WeightsDamaged(f"{path}: tensor {name} holds a NaN or infinite value")
            yield name, tensor


def verified_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest with all its files checked; None for a folder without one, such as a base model."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    return verify(folder, hashlib.sha256(path.read_bytes()).hexdigest())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}; give --model a checkpoint folder") from error
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise SetupError(f"{path} holds a {type(raw).__name__}, expected an object")
    return raw
