"""Log-probs of sampled tokens and entropies from logits, with three copies of them at the peak, there and back.

Legend: C sampled tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

NUCLEUS_PARTS = 16
"""Sorting takes six times the memory of what it sorts: so many parts of the tokens are sorted one after the other."""


class TokenScores(torch.autograd.Function):
    """[C, V] logits and [C] ids -> [C] log-probs and [C] entropies, in nats, at a temperature and top-p.

    The entropies are empty where nobody asks for them. As plain operations, autograd would keep each of their
    intermediates, five to seven copies of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CV: torch.Tensor, ids_C: torch.Tensor, temperature: float, top_p: float, with_entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps one copy for the backward pass: the log-probs of all tokens."""
        scaled_CV = logits_CV.to(torch.float32, copy=True).div_(temperature)
        if top_p < 1:
            _cut_nucleus(scaled_CV, ids_C, top_p)
        log_softmax_CV = scaled_CV.log_softmax(dim=-1)
        del scaled_CV
        logprobs_C = log_softmax_CV.gather(1, ids_C[:, None])[:, 0]
        # Outside the nucleus 0 times -inf would be NaN, there and back.
        log_softmax_CV.clamp_(min=torch.finfo(torch.float32).min)
        entropies_C = logprobs_C.new_zeros(0)
        if with_entropies:
            entropies_C = -log_softmax_CV.exp().mul_(log_softmax_CV).sum(dim=-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_softmax_CV, ids_C, entropies_C)
        ctx.temperature, ctx.dtype = temperature, logits_CV.dtype
        return logprobs_C, entropies_C

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs_C: torch.Tensor | None, of_entropies_C: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        """The gradient of the logits, in their own precision."""
        gradient_CV = _gradient(*ctx.saved_tensors, of_logprobs_C=of_logprobs_C, of_entropies_C=of_entropies_C)
        of_logits_CV = None if gradient_CV is None else gradient_CV.div_(ctx.temperature).to(ctx.dtype)
        return of_logits_CV, None, None, None, None


def _gradient(
    log_softmax_CV: torch.Tensor,
    ids_C: torch.Tensor,
    entropies_C: torch.Tensor,
    *,
    of_logprobs_C: torch.Tensor | None,
    of_entropies_C: torch.Tensor | None,
) -> torch.Tensor | None:
    """[C, V] gradient of the softmax's logits: with its p, d log p(id) = 1(id) - p, and dH = -p (log p + H)."""
    probs_CV = log_softmax_CV.exp()
    gradient_CV = None
    if of_entropies_C is not None and len(entropies_C):
        gradient_CV = (log_softmax_CV + entropies_C[:, None]).mul_(probs_CV).mul_(-of_entropies_C[:, None])
    if of_logprobs_C is not None:
        of_ids_CV = probs_CV.mul_(-of_logprobs_C[:, None]).scatter_add_(1, ids_C[:, None], of_logprobs_C[:, None])
        gradient_CV = of_ids_CV if gradient_CV is None else gradient_CV.add_(of_ids_CV)
    return gradient_CV


def token_scores(
    logits_CV: torch.Tensor, ids_C: torch.Tensor, *, temperature: float, top_p: float, with_entropies: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[C] log-probs in nats of the ids, and [C] entropies in nats, which are empty where nobody asks for them."""
    logprobs_C, entropies_C = TokenScores.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
        logits_CV, ids_C, temperature, top_p, with_entropies
    )
    return logprobs_C, entropies_C


def _cut_nucleus(logits_CV: torch.Tensor, ids_C: torch.Tensor, top_p: float) -> None:
    """Set the logits outside the nucleus to -inf, but for those of the ids.

    Under newer weights a token may have left the nucleus that it was sampled from: it is kept, or its ratio would be 0
    and its log-prob infinite.
    """
    size = -(-len(ids_C) // NUCLEUS_PARTS) or 1
    for part_CV, part_C in zip(logits_CV.split(size), ids_C.split(size), strict=True):
        outside_CV = outside_nucleus(part_CV, top_p).scatter_(1, part_C[:, None], value=False)
        part_CV.masked_fill_(outside_CV, -torch.inf)


def outside_nucleus(logits_CV: torch.Tensor, top_p: float) -> torch.Tensor:
    """[C, V] True outside the smallest set of likeliest tokens with at least `top_p` of the probability.

    Nucleus sampling (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1).
    """
    probs_CV, order_CV = logits_CV.softmax(dim=-1).sort(dim=-1, descending=True)
    outside_CV = probs_CV.cumsum(dim=-1) - probs_CV >= top_p
    return torch.empty_like(outside_CV).scatter_(1, order_CV, outside_CV)
