"""Values and gradients of the one operation that scores logits, against plain ones in float64."""

from __future__ import annotations

import pytest
import torch

from trainer.token_scores import token_scores


def plain_scores(
    logits_CV: torch.Tensor, ids_C: torch.Tensor, kept_CV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_CV = logits_CV.masked_fill(~kept_CV, -torch.inf).log_softmax(-1)
    entropies_C = -(logprobs_CV.exp() * logprobs_CV.masked_fill(~kept_CV, 0.0)).sum(-1)
    return logprobs_CV.gather(1, ids_C[:, None])[:, 0], entropies_C


@pytest.mark.parametrize("of_entropies", [0.0, 0.7])
@pytest.mark.parametrize("of_logprobs", [0.0, -1.3])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_values_and_gradients_are_those_of_plain_operations(
    top_p: float, of_logprobs: float, of_entropies: float
) -> None:
    temperature = 0.8
    probs_CV = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.9, 0.04, 0.03, 0.03], [0.2, 0.3, 0.1, 0.4]])
    # By hand: the likeliest that come to 0.6, and the sampled token wherever it stands.
    kept_CV = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]).bool() | torch.tensor(top_p == 1)
    ids_C = torch.tensor([1, 2, 1])

    expected_CV = (temperature * probs_CV.double().log()).requires_grad_()
    found_CV = expected_CV.detach().float().requires_grad_()
    expected = plain_scores(expected_CV / temperature, ids_C, kept_CV)
    found = token_scores(found_CV, ids_C, temperature=temperature, top_p=top_p, with_entropies=True)
    weights_C = torch.tensor([1.0, -2.0, 0.5])
    for logprobs_C, entropies_C in (expected, found):
        (weights_C * (of_logprobs * logprobs_C + of_entropies * entropies_C)).sum().backward()

    for wanted, value in zip(expected, found, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=1e-6)
    assert found_CV.grad is not None
    torch.testing.assert_close(found_CV.grad.double(), expected_CV.grad, rtol=0, atol=1e-6)


def test_entropies_that_nobody_asks_for_are_empty() -> None:
    logits_CV = torch.zeros(2, 4, requires_grad=True)
    logprobs_C, entropies_C = token_scores(
        logits_CV, torch.tensor([0, 3]), temperature=1.0, top_p=1.0, with_entropies=False
    )
    assert logprobs_C.tolist() == pytest.approx([-1.3862944] * 2)
    assert len(entropies_C) == 0
    logprobs_C.sum().backward()
    assert logits_CV.grad is not None
    assert logits_CV.grad.tolist() == [[0.75, -0.25, -0.25, -0.25], [-0.25, -0.25, -0.25, 0.75]]
    # As a pass over rows without sampled tokens has them.
    nothing, _ = token_scores(logits_CV[:0], torch.zeros(0).long(), temperature=1.0, top_p=0.9, with_entropies=True)
    assert len(nothing) == 0
