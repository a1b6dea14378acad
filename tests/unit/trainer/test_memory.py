"""The estimate of a step's memory, against what torch keeps."""

from __future__ import annotations

from pathlib import Path

import torch

from common.config import RunConfig
from common.memory import estimate_memory
from common.model_folder import read_model_shape
from tests.unit.trainer.conftest import MakeSample
from trainer.policy import Policy
from trainer.samples import pad


def test_estimate_is_close_to_what_torch_holds(start_folder: Path, make_random_sample: MakeSample) -> None:
    config = RunConfig(name="mine", model=start_folder)
    policy = Policy.load(config)
    estimate = estimate_memory(config, read_model_shape(start_folder))
    assert estimate is not None
    assert estimate.parameters == sum(p.numel() * 4 for p in policy.model.parameters())

    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = pad([make_random_sample(index, length=128) for index in range(4)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_BL = policy.logprobs(batch)
    # Of the logits, autograd keeps one copy; the others are alive for a moment.
    kept = (estimate.activations + estimate.logits / 4) * batch.ids_BL.numel() / estimate.positions
    assert 2 / 3 < kept / sum(saved.values()) < 4 / 3

    logprobs_BL.sum().backward()
    policy.optimizer.step()
    state = policy.state()
    moments = sum(tensor.numel() * 4 for name, tensor in state.items() if "exp_avg" in name)
    assert moments == estimate.optimizer
