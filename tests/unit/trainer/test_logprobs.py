"""Packed rows and log-probs in chunks: the same values and gradients, in memory that all logits would not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.live_bytes import LiveBytes
from common.config_train import TrainConfig
from trainer.policy import Policy
from trainer.samples import Sample, microbatches, pad
from trainer.tiny import VOCAB_SIZE

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]

CHUNKED: dict[str, object] = {"max_logits": 5 * VOCAB_SIZE}
WAYS: list[dict[str, object]] = [
    {"packing": True},
    CHUNKED,
    CHUNKED | {"packing": True},
    CHUNKED | {"packing": True, "gradient_checkpointing": True},
]


def computed(policy: Policy, rows: Sequence[Sample]) -> tuple[dict[int, np.ndarray], torch.Tensor]:
    """Log-probs and entropies of each row, by episode, and the gradient of a weighted sum of them."""
    for parameter in policy.model.parameters():
        parameter.grad = None
    batch = pad(rows)
    logprobs_BL, entropies_BL = policy.score(batch, with_entropies=True)
    weights_B1 = torch.tensor([[np.sin(row.episode_id)] for row in rows])
    ((logprobs_BL - 0.1 * entropies_BL) * weights_B1).sum().div(batch.mask_BL.sum()).backward()
    values = torch.stack([logprobs_BL, entropies_BL]).detach().numpy()
    by_episode = {row.episode_id: values[:, index][:, : len(row.ids_L)] for index, row in enumerate(rows)}
    gradients = [parameter.grad.flatten() for parameter in policy.model.parameters() if parameter.grad is not None]
    return by_episode, torch.cat(gradients)


def with_small_logits(policy: Policy) -> Policy:
    """Log-probs near -6 in place of -12: their rounding errors in float32 are then well below 1e-6."""
    policy.model.get_input_embeddings().get_parameter("weight").data.mul_(0.3)
    return policy


@pytest.fixture
def rows(make_random_sample: MakeSample) -> list[Sample]:
    return [make_random_sample(number, length=12 + 8 * (number * 5 % 7)) for number in range(1, 8)]


@pytest.mark.parametrize(
    ("top_p", "adapted"), [(1.0, {}), (0.9, {"lora_rank": 2, "lora_modules": ("q_proj", "lm_head")})], ids=["", "lora"]
)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_values_and_gradients_are_those_of_padded_rows_in_any_order(
    make_policy: MakePolicy, rows: list[Sample], way: dict[str, object], top_p: float, adapted: dict[str, object]
) -> None:
    expected, gradient = computed(with_small_logits(make_policy(top_p=top_p, **adapted)), rows)
    assert gradient.abs().max() > 1e-3
    policy = with_small_logits(make_policy(top_p=top_p, **adapted, **way))
    for order in (rows, rows[::-1], rows[3:] + rows[:3]):
        found, found_gradient = computed(policy, order)
        for episode_id, values in expected.items():
            (logprobs_L, entropies_L), (expected_L, expected_entropies_L) = found[episode_id], values
            np.testing.assert_allclose(logprobs_L, expected_L, rtol=0, atol=1e-6)
            np.testing.assert_allclose(entropies_L, expected_entropies_L, rtol=1e-6)
        np.testing.assert_allclose(found_gradient, gradient, rtol=0, atol=1e-6)


def test_a_packed_row_does_not_see_its_neighbours(make_policy: MakePolicy, make_random_sample: MakeSample) -> None:
    policy, row = make_policy(packing=True), make_random_sample(1)
    with torch.no_grad():
        first, second = (
            policy.logprobs(pad([make_random_sample(other, length=40), row, make_random_sample(other)]))[1]
            for other in (2, 3)
        )
    assert torch.equal(first, second)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_is_the_same_step(make_policy: MakePolicy, rows: list[Sample], way: dict[str, object]) -> None:
    advantages = {row.episode_id: 1.0 if row.episode_id % 2 else -1.0 for row in rows}
    train = {
        "anchor": "proximal",
        "kl": "loss",
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "max_positions": 96,
    }
    plain, other = make_policy(**train), make_policy(**train, **way)
    expected, found = (policy.train_step(rows, advantages, version=2) for policy in (plain, other))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_packed_microbatches_fill_the_token_budget(make_random_sample: MakeSample) -> None:
    rows = [make_random_sample(number, length=length) for number, length in enumerate((8, 40, 16, 8, 24, 60))]
    lengths = [[len(row.ids_L) for row in batch] for batch in microbatches(rows, max_positions=56, packing=True)]
    assert lengths == [[8, 8, 16, 24], [40], [60]]


def peak_bytes(model: PreTrainedModel, rows: Sequence[Sample], **train: object) -> int:
    config = TrainConfig.model_validate({"packing": True, "gradient_checkpointing": True} | train)
    policy = Policy(model, train=config, temperature=1.0, seed=0)
    with LiveBytes() as memory:
        logprobs_BL, entropies_BL = policy.score(pad(rows), with_entropies=True)
        (logprobs_BL + entropies_BL).sum().backward()
    return memory.peak


def test_logits_of_all_tokens_never_exist_together(make_random_sample: MakeSample) -> None:
    vocabulary = 8192
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        pad_token_id=0,
    )
    rows = [make_random_sample(number, length=100) for number in range(8)]
    size = 4 * vocabulary * sum(row.num_tokens for row in rows)
    assert peak_bytes(Qwen3ForCausalLM(config), rows) > 4 * size
    assert peak_bytes(Qwen3ForCausalLM(config), rows, max_logits=16 * vocabulary) < size / 2
