"""Estimators of the KL divergence: values by hand, and what their means and gradients are."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.kl import Estimator, kl_estimate


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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_huge_difference_stays_finite(estimator: Estimator) -> None:
    assert kl_estimate(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]), estimator=estimator).isfinite().all()
