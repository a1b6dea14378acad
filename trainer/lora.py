"""A LoRA adapter over the frozen start weights: made for the policy, saved as a version's folder.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1: W + (alpha / rank) B A, with A random
and B zero at the start, so version 0 is the start weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from common.config_train import TrainConfig
from common.errors import SetupError
from common.memory import LORA_MODULES
from common.weights import ADAPTER_WEIGHTS

_NAME = "default"
"""PEFT's own name for the only adapter."""


def with_adapter(model: PreTrainedModel, *, train: TrainConfig, seed: int) -> PreTrainedModel:
    """The model with a new adapter, which alone is trainable. Raises SetupError for a name that no layer has.

    The same seed gives the same adapter: a trainer that starts again before version 1 must have published what it has.
    """
    # Half a second and 100 MB that runs without LoRA need not spend.
    from peft import LoraConfig, get_peft_model

    assert train.lora_rank is not None
    modules = adapted_layers(model, train=train)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=train.lora_rank,
        lora_alpha=train.lora_alpha or 2 * train.lora_rank,
        target_modules=list(modules),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT still asks transformers under a name that is to go.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    # It passes calls and attributes on to the model; only to the type checker it is something else.
    return cast(PreTrainedModel, adapted)


def adapted_layers(model: PreTrainedModel, *, train: TrainConfig) -> tuple[str, ...]:
    """Names of the layers that the adapter is on. Raises SetupError for a name that no layer has."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    modules = train.lora_modules or tuple(name for name in LORA_MODULES if name in names)
    if unknown := [name for name in modules if name not in names]:
        raise SetupError(f"train.lora_modules: the model has no linear layer {unknown[0]}, it has {sorted(names)}")
    return modules


def without_adapter(model: Any) -> AbstractContextManager[None]:
    """Within the block, the model computes with its start weights."""
    switched_off: AbstractContextManager[None] = model.disable_adapter()
    return switched_off


def adapter_writer(model: Any, *, weights: Mapping[str, torch.Tensor] | None = None) -> Callable[[Path], None]:
    """A function that writes the adapter into a folder, in float32, as PEFT and vLLM read it.

    `weights` are the adapter's where the model has only a rank's part of them.
    """
    from peft import get_peft_model_state_dict

    def write(folder: Path) -> None:
        # The embedding layers never have an adapter; left to itself, PEFT would ask the model hub about them.
        tensors = get_peft_model_state_dict(model, state_dict=weights, adapter_name=_NAME, save_embedding_layers=False)
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            folder / ADAPTER_WEIGHTS,
            metadata={"format": "pt"},
        )
        # The library makes it for its owner alone; engines may run as another user.
        (folder / ADAPTER_WEIGHTS).chmod(0o644)
        config = copy.deepcopy(model.peft_config[_NAME])
        config.inference_mode = True
        config.save_pretrained(folder)

    return write


def adapter_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """What `adapter_writer` wrote, by the names that the parameters have in the model."""
    saved = load_file(folder / ADAPTER_WEIGHTS)
    return {f"{name.removesuffix('.weight')}.{_NAME}.weight": tensor for name, tensor in saved.items()}
