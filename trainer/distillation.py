"""On-policy distillation: advantages of single tokens from what a teacher thinks of them. Pure functions.

Legend: B rows of a batch, L positions of a row. Positions outside the mask must hold 0.
"""

from __future__ import annotations

import torch

from common.config_distill import DistillConfig
from trainer.importance import MAX_LOG_RATIO


def teacher_gain(anchor_BL: torch.Tensor, teacher_BL: torch.Tensor) -> torch.Tensor:
    """[B, L] log teacher - log anchor of each sampled token in nats, cut at MAX_LOG_RATIO; without gradient.

    Its mean over the anchor's tokens is -KL(anchor || teacher). As the advantage of a token, multiplied with the ratio
    policy / anchor, its gradient at ratio 1 is that of -KL(policy || teacher) of each next-token distribution, with
    what is sampled held fixed: the reverse KL on the policy's own sequences of Agarwal et al. 2024, "On-policy
    distillation of language models" (GKD), section 3, estimated from the sampled token alone.
    """
    return (teacher_BL - anchor_BL).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_teacher(
    advantages_BL: torch.Tensor, anchor_BL: torch.Tensor, teacher_BL: torch.Tensor, *, distill: DistillConfig
) -> torch.Tensor:
    """[B, L] advantages of the rewards, or none of them, plus `weight` times the teacher's gain.

    One sum under one clip: two clipped objectives would bound the step to the anchor twice, and differently.
    """
    rewards_BL = advantages_BL if distill.with_rewards else torch.zeros_like(advantages_BL)
    return rewards_BL + distill.weight * teacher_gain(anchor_BL, teacher_BL)
