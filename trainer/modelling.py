"""How the model computes, whatever it is trained for: attention over packed rows, precision, layers computed twice.

Legend: B rows of a batch, L positions of a row, P positions of all rows of a batch, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from common.config_train import TrainConfig
from common.errors import SetupError
from common.model_folder import no_model
from trainer.samples import Batch

ROW_BY_ROW = "rollmill_rows"
"""Name of `attend_within_rows` among the attention implementations of transformers."""
ATTENTIONS: tuple[str, ...] = get_args(TrainConfig.model_fields["attention"].annotation)
PACKABLE = {
    name: {"full_attention"} if name == "sdpa" else {"full_attention", "sliding_attention"} for name in ATTENTIONS
}
"""Kinds of layers, as model configurations name them, that each attention can keep within rows."""


def set_up(model: PreTrainedModel, *, train: TrainConfig) -> PreTrainedModel:
    """The model, set to compute as `train` says. Raises SetupError where it cannot."""
    if train.packing:
        _check_packable(model, train=train)
    if train.attention != model.config._attn_implementation:
        try:
            model.set_attn_implementation(train.attention)
        except (ImportError, ValueError) as error:
            # The library goes on to advise what train.attention does not offer.
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise SetupError(
                f"train.attention = {train.attention!r}: {reason}. {_others(model, train=train)}"
            ) from error
    if train.packing and train.attention == "sdpa":
        AttentionInterface.register(ROW_BY_ROW, attend_within_rows)
        model.set_attn_implementation(ROW_BY_ROW)
    if train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def _check_packable(model: PreTrainedModel, *, train: TrainConfig) -> None:
    """By the configuration: rows long enough to show it cannot be tried out."""
    config = model.config.get_text_config()
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    narrow = window is not None and (context is None or window < context)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if narrow else "full_attention"])
    if kinds <= PACKABLE[train.attention]:
        return
    fitting = [name for name in _supported(model) if kinds <= PACKABLE[name]]
    advice = (
        f"take attention = {' or '.join(map(repr, fitting))}, or packing = false" if fitting else "take packing = false"
    )
    raise SetupError(
        f"train.packing: the model has layers of {sorted(kinds)}, and only {sorted(PACKABLE[train.attention])} can be "
        f"packed with train.attention = {train.attention!r}: {advice}"
    )


def _supported(model: PreTrainedModel) -> list[str]:
    """What the model's code can compute with; whether it is installed is another question."""
    return [name for name in ATTENTIONS if (model._supports_sdpa if name == "sdpa" else model._supports_flash_attn)]


def _others(model: PreTrainedModel, *, train: TrainConfig) -> str:
    others = [name for name in _supported(model) if name != train.attention]
    return f"Take {' or '.join(map(repr, others))}, if that is installed" if others else "Take another model"


@contextmanager
def as_single_rows(model: PreTrainedModel, *, train: TrainConfig) -> Iterator[None]:
    """Within the block, the model takes rows that are not packed, as if train.packing were false."""
    if not (train.packing and train.attention == "sdpa"):
        yield
        return
    model.set_attn_implementation(train.attention)
    try:
        yield
    finally:
        model.set_attn_implementation(ROW_BY_ROW)


def load_model(folder: Path, *, field: str = "model") -> PreTrainedModel:
    """The model of a folder in float32; `field` is where the configuration names it. Raises SetupError that names the
    folder."""
    if not (folder / "config.json").is_file():
        raise SetupError(no_model(folder, field=field))
    # stderr is the log.
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SetupError(f"model folder {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def recompute_layers(model: PreTrainedModel) -> None:
    """Let the layers drop their activations though the model is in evaluation mode, which keeps dropout away."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # Of the layer alone: its children, dropout among them, stay in evaluation mode.
            module.training = True
            for name, value in vars(module).items():
                # Some layers have no module for dropout, and ask their own mode.
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def autocast(train: TrainConfig, *, device: torch.device, enabled: bool = True) -> torch.autocast:
    """Within the block matrix products are in `train.dtype`, from float32 weights, which get float32 gradients.

    `enabled` = False: they stay in float32.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled and train.dtype == "bfloat16")


def base_of(model: Any) -> Any:
    """The model itself where an adapter wraps it; the adapter's layers are in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def vocabulary_size(model: PreTrainedModel) -> int:
    """Logits of a position."""
    return int(model.config.get_text_config().vocab_size)


def packed_arguments(batch: Batch, *, train: TrainConfig) -> dict[str, Any]:
    """What the model is called with, so that all rows of a batch are one sequence [1, P] without padding.

    Positions begin at 0 in each row, and no position sees another row.
    """
    lengths = batch.lengths_B.tolist()
    positions_P = torch.cat([torch.arange(length, device=batch.ids_BL.device) for length in lengths])
    arguments: dict[str, Any] = {"input_ids": batch.ids_BL[batch.real_BL][None], "position_ids": positions_P[None]}
    if train.attention == "sdpa":
        return arguments | {"row_lengths": lengths}
    ends = torch.nn.functional.pad(batch.lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    return arguments | {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def attend_within_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each row over itself, with torch's own kernels; arguments as transformers gives them.

    Row by row, no mask of [P, P] exists (attention_mask is None), and nothing is computed for it. Raises SetupError
    when the model has not passed on the row lengths that it was called with.
    """
    if row_lengths is None:
        raise SetupError(f"{type(module).__name__} is not told where rows begin")
    queries, keys, values = (torch.split(states, row_lengths, dim=2) for states in (query, key, value))
    rows = zip(queries, keys, values, strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)[0] for q, k, v in rows]
    return torch.cat(outputs, dim=1), None
