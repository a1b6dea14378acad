"""On-policy distillation: advantages of single tokens from what a teacher thinks of them. Pure functions.

Legend: B rows of a batch, L positions of a row. Positions outside the mask must hold 0.
"""

from __future__ import annotations

import torch

from common.config_distill import DistillConfig
from trainer.importance import MAX_LOG_RATIO


def teacher_gain(logprobs_BL: torch.Tensor, teacher_BL: torch.Tensor) -> torch.Tensor:
    """[B, L] log teacher - log policy of each sampled token in nats, cut at MAX_LOG_RATIO; without gradient.

    -KL(policy || teacher) has the gradient E[gain x grad log policy] over tokens of the policy. Over those of the
    behaviour policy it is E[policy / behaviour x gain x grad log policy], which the ratio to the anchor and the
    importance weight give between them. So the gain is over the policy as it is now: over the anchor, it would be that
    of -KL(policy || teacher) + KL(policy || anchor), which pushes away from where the tokens are from.

    It is the reverse KL on the policy's own sequences of Agarwal et al. 2024, "On-policy distillation of language
    models" (GKD), section 3, of each next-token distribution with what was sampled before it held fixed, estimated from
    the sampled token alone. Exact in the mean but for what clip and cap take away, as of the rewards.
    """
    return (teacher_BL - logprobs_BL).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def with_teacher(
    advantages_BL: torch.Tensor, logprobs_BL: torch.Tensor, teacher_BL: torch.Tensor, *, distill: DistillConfig
) -> torch.Tensor:
    """[B, L] advantages of the rewards, or none of them, plus `weight` times the teacher's gain.

    One sum under one clip: two clipped objectives would bound the step to the anchor twice, and differently.
    """
    rewards_BL = advantages_BL if distill.with_rewards else torch.zeros_like(advantages_BL)
    return rewards_BL + distill.weight * teacher_gain(logprobs_BL, teacher_BL)
