"""Draws one token for each request of the batch and reports its log-prob under the distribution it was drawn from.

That is vLLM's `processed_logprobs`: after temperature, top-k and top-p. The trainer's behaviour log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class SamplingParams(BaseModel):
    """The fields of vLLM's sampling parameters that this engine knows; any other is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 takes the likeliest token; its log-prob is then that of temperature 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    """0 and -1 keep all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    watermarking: Literal[False] | None = None
    """These five change nothing here, and whoever wants them to is refused."""
    seed: int | None = None
    """Same seed, prompt and weights give the same tokens in any company. None: seeded by the system."""
    max_tokens: int | None = Field(default=16, ge=1)
    """None: as many as the context has room for."""
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[int] = Field(default=[])
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=0)
    """0: the log-prob of each sampled token. None: none. More alternatives a token are not offered."""


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """The parameters of a batch as tensors, built once for each composition of the batch."""

    temperature_N1: Tensor | None
    """None where all are 1. Greedy rows have 1."""
    greedy_N: Tensor | None
    """None where no row is greedy."""
    filtered_M: Tensor | None
    """The M rows with top-k or top-p, None where there are none."""
    top_k_M1: Tensor
    top_p_M1: Tensor


def plan_sampling(params: list[SamplingParams], vocab_size: int) -> SamplingPlan:
    """The plan for a batch of N requests, in the batch's order."""
    greedy = [one.temperature == 0 for one in params]
    temperatures = [1.0 if one.temperature == 0 else one.temperature for one in params]
    filtered = [row for row, one in enumerate(params) if one.temperature > 0 and (one.top_k > 0 or one.top_p < 1)]
    top_k = [params[row].top_k if params[row].top_k > 0 else vocab_size for row in filtered]
    # Above 1 instead of 1: a sum of probabilities that rounds up to 1 must not cut the tail.
    top_p = [params[row].top_p if params[row].top_p < 1 else 2.0 for row in filtered]
    return SamplingPlan(
        temperature_N1=torch.tensor(temperatures)[:, None] if set(temperatures) != {1.0} else None,
        greedy_N=torch.tensor(greedy) if any(greedy) else None,
        filtered_M=torch.tensor(filtered) if filtered else None,
        top_k_M1=torch.tensor(top_k)[:, None],
        top_p_M1=torch.tensor(top_p)[:, None],
    )


def sample(logits_NV: Tensor, plan: SamplingPlan, uniforms: list[float]) -> tuple[list[int], list[float], list[int]]:
    """Sampled ids, their log-probs and their ranks (1 = likeliest), N of each.

    `uniforms` are N draws from [0, 1), one a row, which alone decide each row's token: inverse transform sampling
    (Devroye, Non-Uniform Random Variate Generation, section II.2) needs no noise over the vocabulary.
    """
    if plan.temperature_N1 is not None:
        logits_NV = logits_NV / plan.temperature_N1
    if plan.filtered_M is not None:
        logits_NV[plan.filtered_M] = _filter(logits_NV[plan.filtered_M], plan.top_k_M1, plan.top_p_M1)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    # Doubles: with 24 bits the sums over a large vocabulary would misplace tokens of small probability.
    sums_NV = logprobs_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    targets_N1 = torch.tensor(uniforms, dtype=torch.float64)[:, None] * sums_NV[:, -1:]
    # right=True finds the first sum above the target, which a token of probability 0 never is.
    # The clamp is for logits that are not finite: the caller then sees a log-prob that is none.
    ids_N1 = torch.searchsorted(sums_NV, targets_N1, right=True).clamp_(max=logits_NV.shape[1] - 1)
    if plan.greedy_N is not None:
        ids_N1 = torch.where(plan.greedy_N[:, None], logits_NV.argmax(dim=-1, keepdim=True), ids_N1)
    chosen_N1 = logprobs_NV.gather(1, ids_N1)
    ranks_N = (logprobs_NV >= chosen_N1).sum(dim=-1)
    return ids_N1[:, 0].tolist(), chosen_N1[:, 0].tolist(), ranks_N.tolist()


def _filter(logits_MV: Tensor, top_k_M1: Tensor, top_p_M1: Tensor) -> Tensor:
    """The logits with -inf outside the k likeliest tokens, then outside the nucleus of probability p.

    The nucleus (Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1) is the smallest
    set of likeliest tokens whose probabilities sum up to at least p.
    """
    sorted_MV, order_MV = logits_MV.sort(dim=-1, descending=True)
    sorted_MV = sorted_MV.masked_fill(torch.arange(sorted_MV.shape[-1]) >= top_k_M1, -torch.inf)
    probs_MV = sorted_MV.softmax(dim=-1)
    mass_before_MV = probs_MV.cumsum(dim=-1) - probs_MV
    sorted_MV = sorted_MV.masked_fill(mass_before_MV >= top_p_M1, -torch.inf)
    return torch.empty_like(logits_MV).scatter_(1, order_MV, sorted_MV)
