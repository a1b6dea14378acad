"""Rows as update.py computes their loss and gradient: a batch with its anchor, advantages and start weights' view.

Legend: B rows of a batch, L positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.samples import Batch, Sample


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """A batch with all that its loss needs."""

    samples: tuple[Sample, ...]
    batch: Batch
    anchor_logprobs_BL: torch.Tensor
    """float32, nats; what the ratio is taken against."""
    reference_logprobs_BL: torch.Tensor | None
    """float32, nats, by the start weights; None where the loss has no KL term."""
    advantages_B: torch.Tensor
    """float32."""
    episode_tokens_B: torch.Tensor
    """int64; sampled tokens of the row's episode, over all its rows."""

    def not_finite(self) -> set[int]:
        """Ids of episodes whose loss can be no number, whatever the policy says of them."""
        # Sample has looked at the behaviour log-probs, teacher.py at the teacher's.
        given = (self.advantages_B[:, None], self.anchor_logprobs_BL, self.reference_logprobs_BL)
        finite_B = torch.stack([values.isfinite().all(dim=1) for values in given if values is not None]).all(dim=0)
        return {row.episode_id for row, good in zip(self.samples, finite_B.tolist(), strict=True) if not good}
