"""How the model computes, whatever it is trained for: attention over packed rows, precision, layers computed twice.

Legend: B rows of a batch, L positions of a row, P positions of all rows of a batch, one after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def set_up(model: PreTrainedModel, *, train: TrainConfig) -> PreTrainedModel:
    """The model, set to compute as `train` says. Raises SetupError where it cannot."""
    attention: str = train.attention
    if train.packing and train.attention == "sdpa":
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise SetupError(
                f"train.packing: the model has layers of {sorted(kinds)}, and only full_attention can be packed with "
                'train.attention = "sdpa": take attention = "flash_attention_2", or packing = false'
            )
        AttentionInterface.register(ROW_BY_ROW, attend_within_rows)
        attention = ROW_BY_ROW
    if attention != model.config._attn_implementation:
        try:
            model.set_attn_implementation(attention)
        except (ImportError, ValueError) as error:
            raise SetupError(f"train.attention = {train.attention!r}: {error}") from error
    if train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model


def load_model(folder: Path, *, field: str = "model") -> PreTrainedModel:
    """The model of a folder in float32; `field` is where the configuration names it. Raises SetupError that names the
    folder."""
    if not (folder / "config.json").is_file():
        raise SetupError(no_model(folder, field=field))
    # stderr is the log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
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


def autocast(train: TrainConfig, *, device: torch.device) -> torch.autocast:
    """Within the block matrix products are in `train.dtype`, from float32 weights, which get float32 gradients."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=train.dtype == "bfloat16")


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

    Row by row, no mask of [P, P] exists (attention_mask is None), and nothing is computed for it. Without row_lengths
    it is one row.
    """
    lengths = row_lengths or [query.shape[2]]
    queries, keys, values = (torch.split(states, lengths, dim=2) for states in (query, key, value))
    rows = zip(queries, keys, values, strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)[0] for q, k, v in rows]
    return torch.cat(outputs, dim=1), None
