"""The policy-gradient loss over tokens, and the figures that say whether it is healthy. Pure functions on tensors.

Legend: B rows of a batch, L positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config import TrainConfig

MAX_LOG_RATIO = 20.0
"""Beyond this exp() only makes infinities; the clip has cut the gradient long before."""


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums over the tokens of a batch, so that batches of a step add up whatever their sizes."""

    num_tokens: int = 0
    ratio_sum: float = 0.0
    """Ratio policy / anchor, before any clip or truncation."""
    ratio_max: float = 0.0
    clipped_low: int = 0
    """Tokens with a negative advantage and a ratio below the range: no gradient."""
    clipped_high: int = 0
    """Tokens with a positive advantage and a ratio above the range: no gradient."""
    kl_sum: float = 0.0
    """Estimate of KL(behaviour || policy) in nats: ratio - 1 - log ratio, never negative (Schulman's k3)."""

    def metrics(self) -> dict[str, float]:
        """Means and fractions over the tokens; 0 where there are none."""
        count = max(self.num_tokens, 1)
        return {
            "ratio_mean": self.ratio_sum / count,
            "ratio_max": self.ratio_max,
            "clip_low_fraction": self.clipped_low / count,
            "clip_high_fraction": self.clipped_high / count,
            "approx_kl": self.kl_sum / count,
        }

    def __add__(self, other: TokenStats) -> TokenStats:
        return TokenStats(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            kl_sum=self.kl_sum + other.kl_sum,
        )


def policy_loss(
    logprobs_BL: torch.Tensor,
    *,
    behaviour_logprobs_BL: torch.Tensor,
    anchor_logprobs_BL: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BL: torch.Tensor,
    num_tokens: int,
    train: TrainConfig,
) -> tuple[torch.Tensor, TokenStats]:
    """[B] Sum over a row's sampled tokens of the clipped objective, negated, divided by `num_tokens`.

    The loss of a step is the sum over all its rows, whatever the batches they come in. A row without mask gives 0.

    Token-level loss with clip-higher: Yu et al. 2025, "DAPO", sections 3.1 and 3.3. Dual clip: Ye et al. 2020,
    "Mastering complex control in MOBA games", section on dual-clip PPO. When the anchor is not the behaviour policy,
    tokens carry the importance weight anchor/behaviour (decoupled objective: Hilton et al. 2022, "Batch
    size-invariance for policy optimization", section 3), truncated as in Espeholt et al. 2018, "IMPALA", section 4.1;
    with anchor = behaviour that weight is exactly 1.

    logprobs_BL has the gradient; the others are constants. `num_tokens` counts the sampled tokens of the whole step,
    groups without variance included: dividing by the tokens of this batch would make steps of a few hard groups as
    large as steps of many, and such runs collapse late. Positions outside the mask may hold anything, NaN too.
    """
    logprobs = torch.where(mask_BL, logprobs_BL, 0.0)
    behaviour = torch.where(mask_BL, behaviour_logprobs_BL, 0.0)
    anchor = torch.where(mask_BL, anchor_logprobs_BL, 0.0)
    advantages = advantages_B[:, None].expand_as(logprobs)

    ratio = _ratio(logprobs, anchor)
    clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    floor = torch.where(advantages < 0, train.dual_clip * advantages, -torch.inf)
    weight = _ratio(anchor, behaviour).clamp(max=train.importance_cap)
    objective = torch.maximum(objective, floor) * weight
    loss_B = -torch.where(mask_BL, objective, 0.0).sum(dim=1) / max(num_tokens, 1)

    with torch.no_grad():
        stats = _stats(ratio[mask_BL], advantages[mask_BL], log_ratio=(logprobs - behaviour)[mask_BL], train=train)
    return loss_B, stats


def _ratio(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _stats(ratio: torch.Tensor, advantages: torch.Tensor, *, log_ratio: torch.Tensor, train: TrainConfig) -> TokenStats:
    """Figures of the tokens under the mask; all arguments have one entry per token."""
    if ratio.numel() == 0:
        return TokenStats()
    log_ratio = log_ratio.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return TokenStats(
        num_tokens=ratio.numel(),
        ratio_sum=ratio.double().sum().item(),
        ratio_max=ratio.max().item(),
        clipped_low=int(((advantages < 0) & (ratio < 1 - train.clip_low)).sum()),
        clipped_high=int(((advantages > 0) & (ratio > 1 + train.clip_high)).sum()),
        kl_sum=(log_ratio.exp() - 1 - log_ratio).sum().item(),
    )
