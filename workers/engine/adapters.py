"""Reads a LoRA adapter's folder, as PEFT writes it, and merges it into the start weights: a model of its own.

Merged once at load, a request with an adapter costs what one without does. Adapters and requests without one share the
batch; `batch` decodes those that have the same weights together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightsDamaged
from workers.engine.checkpoint import verified_manifest
from workers.engine.model import Weights

_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter that requests can name."""

    name: str
    folder: Path
    weights: Weights
    """The start weights with the adapter merged in."""


class AdapterConfig(BaseModel):
    """The part of adapter_config.json that decides what the tensors mean."""

    model_config = ConfigDict(frozen=True)

    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None

    @property
    def is_plain(self) -> bool:
        special = self.use_rslora or self.use_dora or self.rank_pattern or self.alpha_pattern or self.modules_to_save
        return not special and self.bias == "none"


def merge_adapter(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The start weights' `tensors` with the folder's adapter added; they themselves stay as they are.

    Raises WeightsDamaged that names the difference between the folder and its manifest, or the model.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise WeightsDamaged(f"No adapter found for {folder}")
    verified_manifest(folder)
    try:
        config = AdapterConfig.model_validate_json((folder / ADAPTER_CONFIG).read_bytes())
        parts = load_file(folder / ADAPTER_WEIGHTS)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WeightsDamaged(f"{folder / ADAPTER_CONFIG}: {where}: {first['msg']}") from None
    except (SafetensorError, OSError) as error:
        raise WeightsDamaged(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    if not config.is_plain:
        raise WeightsDamaged(f"{folder / ADAPTER_CONFIG}: this engine knows only plain LoRA")
    merged = dict(tensors)
    for name in sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in parts}):
        down, up = (parts.pop(f"{_PREFIX}{name}.lora_{part}.weight", None) for part in "AB")
        merged[f"{name}.weight"] = _merged(name, tensors.get(f"{name}.weight"), down, up, config=config)
    if parts:
        raise WeightsDamaged(f"{folder / ADAPTER_WEIGHTS}: tensor {min(parts)} is no part of an adapter")
    return merged


def _merged(
    name: str, weight: Tensor | None, down: Tensor | None, up: Tensor | None, *, config: AdapterConfig
) -> Tensor:
    """W + (alpha / rank) B A, in float32."""
    found = [None if tensor is None else tuple(tensor.shape) for tensor in (down, up)]
    if weight is None:
        raise WeightsDamaged(f"adapter of {name}: the model has no such layer")
    wanted = [(config.r, weight.shape[1]), (weight.shape[0], config.r)]
    if down is None or up is None or found != wanted:
        raise WeightsDamaged(f"adapter of {name}: A and B have shapes {found}, the model needs {wanted}")
    merged = weight + (config.lora_alpha / config.r) * (up.float() @ down.float())
    if not bool(merged.isfinite().all()):
        raise WeightsDamaged(f"adapter of {name}: holds a NaN or infinite value")
    return merged
