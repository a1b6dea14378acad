"""What a folder of start weights says of its model, read without loading it: for plans, estimates and checks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import SetupError
from common.weights import ADAPTER_CONFIG, TensorEntry, WeightsDamaged, read_safetensors_header


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model."""

    num_parameters: int | None
    """None = the folder has no safetensors files to count them in."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    context: int | None
    """Positions that it was made for; None = it does not say."""
    matrices: Mapping[str, int]
    """Name of a linear layer, such as q_proj -> rows and columns of all of its matrices, added up."""

    def num_adapter_parameters(self, rank: int, modules: Collection[str]) -> int:
        """Parameters of a LoRA adapter of this rank on these layers."""
        return rank * sum(self.matrices.get(module, 0) for module in modules)


def is_adapter(folder: Path) -> bool:
    """Whether the folder is a LoRA adapter's, and no model's."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def adapter_base(folder: Path) -> Path | None:
    """The start weights that an adapter's folder names; None = it does not say. Raises SetupError."""
    try:
        named = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from None
    return Path(named) if isinstance(named, str) and named else None


def no_model(folder: Path, *, field: str = "model") -> str:
    """What a folder without config.json is, and what to do; `field` is where the configuration names it."""
    if not is_adapter(folder):
        what = "has no config.json" if folder.is_dir() else "is not there"
        return f"model folder {folder} {what}: set `{field}` to a folder of Hugging Face format"
    base = adapter_base(folder)
    use = "; `rollmill eval --model` plays tasks with an adapter over them" if field == "model" else ""
    return (
        f"{field} = {folder} is a LoRA adapter, not a whole model: set `{field}` to its start weights"
        f"{f', {base}' if base else ''}{use}"
    )


def read_model_shape(folder: Path, *, field: str = "model") -> ModelShape:
    """Read config.json and the headers of the weights. Raises SetupError that names the file and the field.

    `field` is where the run's configuration names the folder.
    """
    path = folder / "config.json"
    config = _read_config(folder, field=field)
    try:
        parts = [read_safetensors_header(file) for file in sorted(folder.glob("*.safetensors"))]
    except (OSError, ValueError, WeightsDamaged) as error:
        raise SetupError(f"model folder {folder} cannot be read: {error}") from None
    # Tensors that are tied are saved once.
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    try:
        return ModelShape(
            num_parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()) or None,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config.get("intermediate_size") or 4 * config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            context=_context(config),
            matrices=_matrices(tensors),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(f"{path} does not say how large the model is: {error!r}") from None


def read_context(folder: Path) -> int | None:
    """Positions that a model was made for; None = it does not say. Raises SetupError where its config can't be read."""
    try:
        return _context(_read_config(folder))
    except (TypeError, ValueError) as error:
        raise SetupError(f"{folder / 'config.json'} does not say how long its context is: {error!r}") from None


def _read_config(folder: Path, *, field: str = "model") -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise SetupError(no_model(folder, field=field))
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # Models that also see images keep the sizes of their text part apart.
        text_config: dict[str, Any] = config.get("text_config", config)
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"model folder {folder} cannot be read: {error}") from None
    return text_config


def _context(config: Mapping[str, Any]) -> int | None:
    context = config.get("max_position_embeddings")
    return None if context is None else int(context)


def _matrices(tensors: Mapping[str, TensorEntry]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(tensor.shape) == 2:
            sizes[layer.rpartition(".")[2]] += sum(tensor.shape)
    return sizes
