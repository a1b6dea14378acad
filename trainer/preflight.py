"""What the trainer would refuse at its start, asked before: `--dry-run` says each thing that was checked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.config import RunConfig
from common.errors import SetupError
from trainer.lora import adapted_layers
from trainer.modelling import set_up
from trainer.teacher import check_teacher
from trainer.tracking import check_installed


def check_start(config: RunConfig) -> Iterator[str]:
    """A line for each thing that is in order. Raises SetupError for the first that is not.

    No weights are read: the model is made of its shapes alone.
    """
    train = config.train
    check_installed(config.tracking)
    if config.tracking.sinks:
        yield f"sinks {', '.join(config.tracking.sinks)} are installed"
    try:
        with torch.device("meta"):
            shapes = AutoConfig.from_pretrained(config.model, local_files_only=True)
            model = AutoModelForCausalLM.from_config(shapes)
    except (OSError, ValueError) as error:
        raise SetupError(f"model folder {config.model} cannot be loaded: {str(error).splitlines()[0]}") from error
    set_up(model, train=train)
    yield f"{type(model).__name__} computes with attention {train.attention}"
    if train.lora_rank is not None:
        yield f"the adapter's layers are there: {', '.join(adapted_layers(model, train=train))}"
    if train.distill is not None:
        check_teacher(config)
        yield f"teacher {train.distill.teacher} has the run's tokenizer"
