"""Estimates of the KL divergence from two log-probs of the same sampled token, for the loss or for the reward."""

from __future__ import annotations

import torch

from common.config_train import Estimator
from trainer.importance import MAX_LOG_RATIO


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, estimator: Estimator) -> torch.Tensor:
    """KL(policy || reference) in nats of each token sampled by the policy, in the shape of the arguments.

    With d = log policy - log reference, cut at MAX_LOG_RATIO: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As values,
    k1 and k3 are unbiased, and k3 is never negative: Schulman 2020, "Approximating KL divergence". What trains is the
    gradient, and an estimate that is good as a value need not have a good one (Tang and Munos 2025, "On a few pitfalls
    in KL divergence gradient estimation for RL"; Liu et al. 2025, "Rethinking KL regularization in RLHF"):

    In the reward, where it is a constant that the score of each token is multiplied with, k1 has the divergence's:
    its gradient is E[d grad log policy]. k2 and k3 are of second order in d there, so that they hardly hold a policy
    that is near the reference. Far out k3 is about reference / policy, which is huge for tokens that the policy has
    given up: they are pushed down further, and a collapsed policy collapses more.
    In the loss, through which the gradient goes, k1 has none in the mean, k2 the divergence's, and k3, of Shao et al.
    2024, "DeepSeekMath", equation 4, that of KL(reference || policy), which is the same to first order.
    """
    difference = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference
