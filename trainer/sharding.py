"""A model whose weights, gradients and optimizer state are spread over the ranks, and the way back to whole tensors.

Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel", in torch's second version of it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.config_train import TrainConfig
from trainer.logprobs import TokenScorer
from trainer.ranks import Ranks


def shard(scorer: TokenScorer, *, train: TrainConfig, ranks: Ranks) -> None:
    """Spread the model's parameters over the ranks, in place; each layer is gathered when it computes.

    Gradients are summed over the ranks, not averaged: the loss is divided by the whole step's tokens on each of them.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if train.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    names = set(scorer.model._no_split_modules or ())
    layers = [module for module in scorer.modules() if type(module).__name__ in names]
    for module in (*layers, scorer):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        # Without it the factor goes into the reduction, which gloo cannot.
        sharded.set_force_sum_reduction_for_comms(True)
    scorer.register_forward_hook(_free_without_backward)


def _free_without_backward(scorer: torch.nn.Module, *_: object) -> None:
    """After a pass for values alone: what is left gathered for a backward pass would miss what the shards become."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, scorer).reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor from all its shards, which all ranks must ask for; one that has none is whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, which all ranks have, where `parameter` of the same shape is sharded."""
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
