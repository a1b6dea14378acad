"""The start weights say their log-probs as the policy does: at the run's temperature and top-p. By hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.config_train import TrainConfig
from trainer.policy import Policy
from trainer.samples import Sample

PROBS = (0.5, 0.25, 0.15, 0.1)
"""What the start weights give each token, whatever stands before, at temperature 1."""
HIDDEN = 8


def fixed_model() -> Qwen3ForCausalLM:
    """Nothing but a head over a hidden state of ones."""
    config = Qwen3Config(
        vocab_size=len(PROBS),
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.get_input_embeddings().get_parameter("weight").fill_(1.0)
        model.model.norm.get_parameter("weight").fill_(1.0)
        model.get_output_embeddings().get_parameter("weight").copy_((torch.tensor(PROBS).log() / HIDDEN)[:, None])
    return model


def row_of(*sampled: int) -> Sample:
    """One given id and the sampled ones, each with a behaviour log-prob of 0."""
    length = 1 + len(sampled)
    return Sample(
        episode_id=1,
        group_id=1,
        index=0,
        ids_L=np.array([3, *sampled], np.int32),
        mask_L=np.arange(length) > 0,
        behaviour_logprobs_L=np.zeros(length, np.float32),
        versions_L=np.array([-1] + [0] * len(sampled), np.int32),
    )


@pytest.mark.parametrize(
    ("temperature", "top_p", "probs"),
    [
        (1.0, 1.0, PROBS),
        # The squares, over their sum.
        (0.5, 1.0, [p * p / 0.345 for p in PROBS]),
        # 0.5 and 0.25 are the smallest set with 0.7; a token outside it counts beside it.
        (1.0, 0.7, [0.5 / 0.75, 0.25 / 0.75, 0.15 / 0.9, 0.1 / 0.85]),
        # 0.25 / 0.345 = 0.725 is enough.
        (0.5, 0.7, [1.0, 0.0625 / 0.3125, 0.0225 / 0.2725, 0.01 / 0.26]),
    ],
)
@pytest.mark.parametrize("token", range(len(PROBS)))
def test_distance_to_the_start_weights_is_at_the_temperature_and_top_p_of_the_run(
    temperature: float, top_p: float, probs: list[float], token: int
) -> None:
    train = TrainConfig(kl="reward", kl_coefficient=1.0, kl_estimator="k1")
    policy = Policy(fixed_model(), train=train, temperature=temperature, top_p=top_p, seed=0, reference=fixed_model())
    # k1 is log behaviour - log reference: with a behaviour log-prob of 0, minus what the start weights say.
    assert policy.reference_kl([row_of(token, token)]) == pytest.approx({1: -2 * math.log(probs[token])}, abs=1e-5)


def test_distance_in_the_loss_is_at_the_temperature_and_top_p_of_the_run() -> None:
    train = TrainConfig(kl="loss", kl_coefficient=1.0, kl_estimator="k2", minibatches=1)
    policy = Policy(fixed_model(), train=train, temperature=0.5, top_p=0.7, seed=0, reference=fixed_model())
    # Both are the same weights: any distance would be that of two sampling distributions.
    assert policy.train_step([row_of(0, 1, 2, 3)], {1: 0.0}, version=0)["reference_kl"] == pytest.approx(0, abs=1e-6)
