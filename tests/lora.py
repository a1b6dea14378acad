"""Random adapters over a checkpoint, as the trainer makes and publishes them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.config_train import TrainConfig
from common.weights import Published, WeightStore
from trainer.lora import adapter_writer, with_adapter
from trainer.modelling import load_model


def make_adapted(base: Path, *, seed: int, rank: int = 4) -> PreTrainedModel:
    """A model whose adapter changes every log-prob by far more than rounding does."""
    model = with_adapter(load_model(base), train=TrainConfig(lora_rank=rank), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def publish_adapter(store: WeightStore, run: str, number: int, model: PreTrainedModel) -> Published:
    return store.publish(run, number, adapter_writer(model))
