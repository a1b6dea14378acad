"""Estimates of the KL divergence from two log-probs of the same sampled token, for the loss or for the reward."""

from __future__ import annotations

from typing import Literal

import torch

from trainer.importance import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, estimator: Estimator) -> torch.Tensor:
    """KL(policy || reference) in nats of each token sampled by the policy, in the shape of the arguments.

    With d = log policy - log reference, cut at MAX_LOG_RATIO: k1 = d (unbiased, negative for half the tokens; its
    gradient has mean zero), k2 = d^2 / 2 (biased, but its gradient is that of the divergence), k3 = exp(-d) - 1 + d
    (unbiased and never negative). Schulman 2020, "Approximating KL divergence". k3 in the loss: Shao et al. 2024,
    "DeepSeekMath", equation 4.
    """
    difference = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference
