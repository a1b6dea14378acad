"""The estimate of a step's memory, against what torch keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.live_bytes import LiveBytes
from common.config import RunConfig
from common.memory import LOGIT_COPIES, estimate_memory
from common.model_folder import read_model_shape
from tests.unit.trainer.conftest import MakeSample
from trainer.policy import Policy
from trainer.samples import Sample, pad


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
    kept = (estimate.activations + estimate.logits / LOGIT_COPIES) * batch.ids_BL.numel() / estimate.positions
    assert 2 / 3 < kept / sum(saved.values()) < 4 / 3

    logprobs_BL.sum().backward()
    policy.optimizer.step()
    state = policy.state()
    moments = sum(tensor.numel() * 4 for name, tensor in state.items() if "exp_avg" in name)
    assert moments == estimate.optimizer


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which little but the logits takes memory, as of large ones in passes of few positions."""
    folder = tmp_path_factory.mktemp("wide")
    config = Qwen3Config(
        vocab_size=20000,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_logits", [2**26, 64 * 20000], ids=["at once", "in chunks"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(("with_gradient", "with_entropies"), [(True, False), (True, True), (False, True)])
def test_peak_of_a_pass_is_what_the_estimate_says(
    wide_folder: Path,
    make_random_sample: MakeSample,
    with_gradient: bool,
    with_entropies: bool,
    top_p: float,
    max_logits: int,
    dtype: str,
) -> None:
    batch = pad([without_given(make_random_sample(index, length=128)) for index in range(2)])
    config = RunConfig.model_validate(
        {
            "name": "mine",
            "model": wide_folder,
            "rollout": {"temperature": 0.7, "top_p": top_p, "max_row_tokens": 256},
            "train": {"max_logits": max_logits, "max_positions": batch.ids_BL.numel(), "dtype": dtype},
        }
    )
    policy = Policy.load(config)
    estimate = estimate_memory(config, read_model_shape(wide_folder))
    assert estimate is not None
    with LiveBytes() as memory, torch.set_grad_enabled(with_gradient):
        logprobs_BL, entropies_BL = policy.score(batch, with_entropies=with_entropies)
        if with_gradient:
            (logprobs_BL.sum() + entropies_BL.sum()).backward()
    expected = estimate.logits + with_gradient * (estimate.activations + estimate.gradients)
    assert 2 / 3 < memory.peak / expected < 11 / 10


def without_given(row: Sample) -> Sample:
    """All of the row but its first position is sampled."""
    mask_L = np.arange(len(row.ids_L)) > 0
    return replace(row, mask_L=mask_L, versions_L=np.where(mask_L, 0, row.versions_L[0]).astype(np.int32))
