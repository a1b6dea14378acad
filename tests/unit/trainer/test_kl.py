"""Estimators of the KL divergence: values by hand, and what their means and gradients are."""

from __future__ import annotations

import math

import pytest
import torch

from common.config_train import Estimator, TrainConfig
from trainer.kl import kl_estimate


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_values_by_hand(estimator: Estimator, value: float) -> None:
    # The policy finds the token twice as likely as the reference.
    estimate = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)]), estimator=estimator)
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]), estimator=estimator).item() == 0.0


POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_mean_over_the_policy_is_the_divergence(estimator: Estimator) -> None:
    divergence = (POLICY * (POLICY / REFERENCE).log()).sum().item()
    mean = (POLICY * kl_estimate(POLICY.log(), REFERENCE.log(), estimator=estimator)).sum().item()
    assert mean == pytest.approx(divergence, abs=1e-12)


@pytest.mark.parametrize(("estimator", "is_that_of_the_divergence"), [("k1", False), ("k2", True)])
def test_mean_gradient(estimator: Estimator, is_that_of_the_divergence: bool) -> None:
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    (POLICY * kl_estimate(logprobs, REFERENCE.log(), estimator=estimator)).sum().backward()
    other = POLICY.log().requires_grad_()
    (other.softmax(0) * (other.log_softmax(0) - REFERENCE.log())).sum().backward()
    assert logits.grad is not None
    assert other.grad is not None
    expected = other.grad.tolist() if is_that_of_the_divergence else [0.0] * 3
    assert logits.grad.tolist() == pytest.approx(expected, abs=1e-12)
    assert other.grad.abs().max() > 0.01


SKEWED = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
COLLAPSED = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64)


def gradient_of_reward(policy_V: torch.Tensor, reference_V: torch.Tensor, *, estimator: Estimator) -> list[float]:
    """By the logits, of the mean reward -estimate: the score of each token times what it is worth, held fixed."""
    logits_V = policy_V.log().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    estimates_V = kl_estimate(logprobs_V, reference_V.log(), estimator=estimator).detach()
    (found_V,) = torch.autograd.grad((policy_V * -estimates_V * logprobs_V).sum(), logits_V)
    return list(found_V.tolist())


@pytest.mark.parametrize("policy_V", [POLICY, COLLAPSED, torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)])
def test_by_default_the_reward_has_the_gradient_of_the_divergence(policy_V: torch.Tensor) -> None:
    # By the logit of token v: -p_v (d_v - KL) with d = log policy - log reference.
    difference_V = (policy_V / SKEWED).log()
    expected_V = -policy_V * (difference_V - (policy_V * difference_V).sum())
    estimator = TrainConfig(kl="reward", kl_coefficient=0.1).kl_estimator
    found = gradient_of_reward(policy_V, SKEWED, estimator=estimator)
    assert found == pytest.approx(expected_V.tolist(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_other_estimators_in_the_reward_drive_a_collapsed_policy_further(estimator: Estimator) -> None:
    # d = log 1.4 = 0.336, log 0.05 = -2.996, log 0.1 = -2.303; KL 0.277
    of_k1 = gradient_of_reward(COLLAPSED, SKEWED, estimator="k1")
    assert of_k1 == pytest.approx([-0.05848, 0.03272, 0.02579], abs=1e-4)
    # k2 = 0.0566, 4.487, 2.651, mean 0.1269; k3 = 0.0508, 16.00, 6.697, mean 0.2767
    expected = {"k2": [0.0689, -0.0436, -0.0252], "k3": [0.2214, -0.1573, -0.0642]}[estimator]
    assert gradient_of_reward(COLLAPSED, SKEWED, estimator=estimator) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_huge_difference_stays_finite(estimator: Estimator) -> None:
    assert kl_estimate(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]), estimator=estimator).isfinite().all()
