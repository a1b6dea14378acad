"""The policy-gradient loss over tokens, and the figures that say whether it is healthy. Pure functions on tensors.

Legend: B rows of a batch, L positions of a row. A row is one sequence: an episode from prompt to end, or a part of one
whose history was rewritten. What belongs to an episode, its advantage and its weight, all its rows share; what belongs
to a sequence (GSPO's ratio, importance weights of level "sequence") is of each row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config_train import TrainConfig
from trainer.distillation import with_teacher
from trainer.importance import MAX_LOG_RATIO, Importance, importance
from trainer.kl import kl_estimate


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What the loss of a step is divided by, over all its micro-batches and ranks.

    Episodes without variance or advantage count, those left out as truncated do not. Dividing by the tokens of each
    batch would make steps of a few hard groups as large as steps of many, and such runs collapse late.
    """

    num_tokens: int
    """Sampled tokens."""
    num_episodes: int
    """Those with sampled tokens, however many rows they give."""


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums over the tokens of a batch, so that batches of a step add up whatever their sizes."""

    num_tokens: int = 0
    """Sampled tokens of the rows that were computed: without those of advantage 0, unless needs_all_rows."""
    ratio_sum: float = 0.0
    """Ratio policy / anchor, before any clip or truncation."""
    ratio_max: float = 0.0
    clipped_low: int = 0
    """Tokens with a negative advantage and a ratio below the range. The advantage gives them no gradient; by CISPO, the
    one of the bound."""
    clipped_high: int = 0
    """Tokens with a positive advantage and a ratio above the range; the same holds. Those with a negative one that are
    beyond dual_clip have no gradient either, and are in neither count; nor are those of the other sign that CISPO's
    range bounds."""
    kl_sum: float = 0.0
    """Estimate of KL(behaviour || policy) in nats: ratio - 1 - log ratio, never negative (Schulman's k3)."""
    importance_max: float = 0.0
    """Weight anchor / behaviour, before any cap."""
    importance_above: int = 0
    """Tokens whose weight, before any cap, is above importance_cap."""
    importance_below: int = 0
    """Tokens whose weight is below importance_floor, where there is one."""
    reference_kl_sum: float = 0.0
    """Estimate of KL(policy || start weights) in nats, where it is part of the loss."""

    def metrics(self) -> dict[str, float]:
        """Means and fractions over num_tokens; none at all where there are no tokens."""
        count = self.num_tokens
        if not count:
            return {}
        return {
            "ratio_mean": self.ratio_sum / count,
            "ratio_max": self.ratio_max,
            "clip_low_fraction": self.clipped_low / count,
            "clip_high_fraction": self.clipped_high / count,
            "approx_kl": self.kl_sum / count,
            "importance_max": self.importance_max,
            "importance_above_fraction": self.importance_above / count,
            "importance_below_fraction": self.importance_below / count,
            "reference_kl": self.reference_kl_sum / count,
        }

    def __add__(self, other: TokenStats) -> TokenStats:
        return TokenStats(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            kl_sum=self.kl_sum + other.kl_sum,
            importance_max=max(self.importance_max, other.importance_max),
            importance_above=self.importance_above + other.importance_above,
            importance_below=self.importance_below + other.importance_below,
            reference_kl_sum=self.reference_kl_sum + other.reference_kl_sum,
        )


def policy_loss(
    logprobs_BL: torch.Tensor,
    *,
    behaviour_logprobs_BL: torch.Tensor,
    anchor_logprobs_BL: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BL: torch.Tensor,
    totals: StepTotals,
    train: TrainConfig,
    reference_logprobs_BL: torch.Tensor | None = None,
    entropies_BL: torch.Tensor | None = None,
    episode_tokens_B: torch.Tensor | None = None,
    teacher_logprobs_BL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TokenStats]:
    """[B] Sum over a row's sampled tokens of the objective, negated, divided as train.average says.

    The loss of a step is the sum over all its rows, whatever the batches they come in. A row without mask gives 0.
    logprobs_BL and entropies_BL have the gradient; the others are constants. reference_logprobs_BL is needed where
    train.kl = "loss", entropies_BL where train.entropy_coefficient > 0; both are divided as the rest, and not weighed
    by importance. teacher_logprobs_BL is needed with train.distill (distillation.py). episode_tokens_B are the sampled
    tokens of all rows of a row's episode; None = each row is a whole episode. Positions outside the mask may hold
    anything, NaN too; under it, NaN gives NaN in the loss of its row. An infinite log-prob need not show in the loss,
    as the clip bounds its ratio: check the log-probs themselves.

    Tokens are weighed by anchor / behaviour (importance.py) where the anchor is not the behaviour policy: the decoupled
    objective of Hilton et al. 2022, "Batch size-invariance for policy optimization", section 3, used against staleness
    by Fu et al. 2025, "AReaL", the section on decoupled PPO. With anchor = behaviour that weight is exactly 1.
    """
    logprobs, behaviour, anchor = (
        torch.where(mask_BL, values_BL, 0.0) for values_BL in (logprobs_BL, behaviour_logprobs_BL, anchor_logprobs_BL)
    )
    advantages = advantages_B[:, None].expand_as(logprobs)
    if train.distill is not None:
        assert teacher_logprobs_BL is not None
        teacher = torch.where(mask_BL, teacher_logprobs_BL, 0.0)
        advantages = with_teacher(advantages, logprobs, teacher, distill=train.distill)
    ratio = _ratio(logprobs, anchor, mask=mask_BL, train=train)
    weights = importance(anchor, behaviour, train=train)
    objective = _weighed(logprobs, ratio, advantages, weights, train=train)
    reference_kl = _reference_kl(logprobs, reference_logprobs_BL, mask_BL=mask_BL, train=train)
    if train.kl_coefficient is not None:
        objective = objective - train.kl_coefficient * reference_kl
    if train.entropy_coefficient > 0:
        assert entropies_BL is not None
        objective = objective + train.entropy_coefficient * torch.where(mask_BL, entropies_BL, 0.0)
    tokens_B = mask_BL.sum(dim=1) if episode_tokens_B is None else episode_tokens_B
    loss_B = -torch.where(mask_BL, objective, 0.0).sum(dim=1) / _divisors(tokens_B, totals=totals, train=train)
    with torch.no_grad():
        stats = _stats(
            ratio[mask_BL],
            advantages[mask_BL],
            log_ratio=(logprobs - behaviour)[mask_BL],
            raw_weight=weights.raw_BL[mask_BL],
            reference_kl=reference_kl[mask_BL],
            train=train,
        )
    return loss_B, stats


def needs_all_rows(train: TrainConfig) -> bool:
    """True where a row without advantage has a gradient all the same."""
    return train.kl == "loss" or train.entropy_coefficient > 0 or train.distill is not None


def _weighed(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, weights: Importance, *, train: TrainConfig
) -> torch.Tensor:
    """The objective of train.loss times the importance weights."""
    if train.loss == "cispo":
        objective = _cispo(logprobs, ratio, advantages, train=train)
    else:
        objective = _clipped(ratio, advantages, train=train)
    # 0 times an infinite objective would be NaN.
    return torch.where(weights.is_masked_BL, 0.0, objective) * weights.weight_BL


def _reference_kl(
    logprobs: torch.Tensor, reference_BL: torch.Tensor | None, *, mask_BL: torch.Tensor, train: TrainConfig
) -> torch.Tensor:
    """KL(policy || start weights) of each token in nats; 0 where it is no term of the loss."""
    if train.kl != "loss":
        return torch.zeros_like(logprobs)
    assert reference_BL is not None
    return kl_estimate(logprobs, torch.where(mask_BL, reference_BL, 0.0), estimator=train.kl_estimator)


def _ratio(logprobs: torch.Tensor, anchor: torch.Tensor, *, mask: torch.Tensor, train: TrainConfig) -> torch.Tensor:
    """Ratio policy / anchor of each token; for GSPO the geometric mean over the row, the same for all its tokens.

    An episode of several rows has as many ratios: a row is what its policy saw as one sequence.

    GSPO: Zheng et al. 2025, "Group sequence policy optimization", section 4.1.
    """
    log_ratio = logprobs - anchor
    if train.loss == "gspo":
        mean_B1 = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = mean_B1.expand_as(log_ratio)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, *, train: TrainConfig) -> torch.Tensor:
    """The smaller of the plain and the clipped objective, bounded from below where the advantage is negative.

    PPO: Schulman et al. 2017, "Proximal policy optimization algorithms", section 3. Clip-higher: Yu et al. 2025,
    "DAPO", section 3.1. Dual clip: Ye et al. 2020, "Mastering complex control in MOBA games", the section on dual-clip
    PPO.
    """
    clipped = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    floor = torch.where(advantages < 0, train.dual_clip * advantages, -torch.inf)
    return torch.maximum(objective, floor)


def _cispo(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, *, train: TrainConfig
) -> torch.Tensor:
    """REINFORCE with the clipped ratio as a constant weight: a token beyond the clip still has a gradient.

    CISPO: MiniMax 2025, "MiniMax-M1" (arXiv 2506.13585), section 3.1, which sets no lower bound: it would give a token
    that the policy hardly samples any more the weight of one that it does.
    """
    return ratio.detach().clamp(1 - train.clip_low, 1 + train.clip_high) * advantages * logprobs


def _divisors(episode_tokens_B: torch.Tensor, *, totals: StepTotals, train: TrainConfig) -> torch.Tensor | int:
    """What the sum over each row is divided by: a number, or [B]; never 0.

    Tokens: Yu et al. 2025, "DAPO", section 3.3. Episodes: Shao et al. 2024, "DeepSeekMath", equation 3. A constant: Liu
    et al. 2025, "Understanding R1-Zero-like training", section 3.2.
    """
    if train.average == "token":
        return max(totals.num_tokens, 1)
    if train.average == "episode":
        return episode_tokens_B.clamp(min=1) * max(totals.num_episodes, 1)
    assert train.divisor_tokens is not None
    return max(totals.num_episodes, 1) * train.divisor_tokens


def _stats(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    log_ratio: torch.Tensor,
    raw_weight: torch.Tensor,
    reference_kl: torch.Tensor,
    train: TrainConfig,
) -> TokenStats:
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
        importance_max=raw_weight.max().item(),
        importance_above=int((raw_weight > train.importance_cap).sum()),
        importance_below=int((raw_weight < (train.importance_floor or 0.0)).sum()),
        reference_kl_sum=reference_kl.double().sum().item(),
    )
