"""Importance weights: what a token counts in the loss because the behaviour policy was not the anchor policy.

Legend: B rows of a batch, L positions of a row. Positions outside the mask must hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.config_train import TrainConfig

MAX_LOG_RATIO = 20.0
"""Beyond this exp() only makes infinities; the clip has cut the gradient long before."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Weights of a batch; constants, without gradient where the log-probs have none."""

    weight_BL: torch.Tensor
    """What the loss of a token is multiplied with: 0 where `is_masked_BL`."""
    raw_BL: torch.Tensor
    """The weight before any cap, for the figures: counted after the cap, nothing would ever be above it."""
    is_masked_BL: torch.Tensor
    """bool; tokens that correction = "mask" takes out of the loss. They stay in its divisor."""


def importance(anchor_BL: torch.Tensor, behaviour_BL: torch.Tensor, *, train: TrainConfig) -> Importance:
    """Weights anchor / behaviour by train.correction and train.correction_level; exactly 1 where both are the same.

    Truncated at the token: Espeholt et al. 2018, "IMPALA", section 4.1; against the gap between engine and trainer
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS). Masked (MIS), and
    at the level of the sequence, where the weight is the product over the row's tokens: Liu et al. 2025, "When speed
    kills stability", the sections on token- and sequence-level correction. Masked on both sides: Ling team 2025,
    "Every step evolves", the section on IcePop. The rows of one episode have a weight each. Log-ratios are cut at
    MAX_LOG_RATIO.
    """
    log_ratio = anchor_BL - behaviour_BL
    if train.correction_level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    nothing = torch.zeros_like(raw, dtype=torch.bool)
    if train.correction == "none":
        return Importance(weight_BL=torch.ones_like(raw), raw_BL=raw, is_masked_BL=nothing)
    if train.correction == "truncate":
        return Importance(weight_BL=raw.clamp(max=train.importance_cap), raw_BL=raw, is_masked_BL=nothing)
    is_masked = (raw > train.importance_cap) | (raw < (train.importance_floor or 0.0))
    return Importance(weight_BL=torch.where(is_masked, 0.0, raw), raw_BL=raw, is_masked_BL=is_masked)
