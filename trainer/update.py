"""One optimizer step of a policy: its rows with all that their loss needs, their loss and gradient, the update.

All ranks call these functions, and come to the same end. Legend: B rows of a batch, L positions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.losses import StepTotals, TokenStats, policy_loss
from trainer.ranks import AgreedError
from trainer.samples import Sample, num_tokens_by_episode, pad
from trainer.sharding import whole
from trainer.train_batch import TrainBatch

if TYPE_CHECKING:
    from trainer.policy import Policy


class TrainingError(AgreedError):
    """The numbers of a training step are not finite. The message names the step and the episodes."""


def prepare(policy: Policy, samples: Sequence[Sample], advantages: Mapping[int, float]) -> list[TrainBatch]:
    """The rows of one optimizer step in batches that fit the memory, with anchors from the present weights."""
    prepared = []
    tokens = num_tokens_by_episode(samples)
    for rows in policy.microbatches(samples):
        batch = pad(rows)
        if policy.train.anchor == "proximal":
            with torch.no_grad():
                anchor_BL = policy.logprobs(batch)
        else:
            anchor_BL = batch.behaviour_logprobs_BL
        advantages_B = torch.tensor([advantages[row.episode_id] for row in rows], dtype=torch.float32)
        reference_BL = None
        if policy.train.kl == "loss":
            with torch.no_grad():
                reference_BL = policy.reference_logprobs(batch)
        prepared.append(
            TrainBatch(
                samples=tuple(rows),
                batch=batch,
                anchor_logprobs_BL=anchor_BL,
                reference_logprobs_BL=reference_BL,
                advantages_B=advantages_B,
                episode_tokens_B=torch.tensor([tokens[row.episode_id] for row in rows]),
            )
        )
    return prepared


def refuse_infinite(policy: Policy, minibatches: Sequence[Sequence[TrainBatch]], *, version: int) -> None:
    """Raise TrainingError, on all ranks, for the episodes of rows that come with a number that is not finite."""
    wrong = {episode_id for minibatch in minibatches for part in minibatch for episode_id in part.not_finite()}
    refuse(set[int]().union(*policy.ranks.gather(wrong)), what="loss", version=version)


def update(
    policy: Policy, minibatch: Sequence[TrainBatch], *, version: int, totals: StepTotals
) -> tuple[float, TokenStats, float]:
    """One optimizer step; returns loss, token figures and the gradient norm before clipping."""
    policy.optimizer.zero_grad()
    loss, stats, wrong = 0.0, TokenStats(), set[int]()
    for part in minibatch:
        with_entropies = policy.train.entropy_coefficient > 0
        logprobs_BL, entropies_BL = policy.score(part.batch, with_entropies=with_entropies)
        loss_B, part_stats = policy_loss(
            logprobs_BL,
            behaviour_logprobs_BL=part.batch.behaviour_logprobs_BL,
            anchor_logprobs_BL=part.anchor_logprobs_BL,
            advantages_B=part.advantages_B,
            mask_BL=part.batch.mask_BL,
            totals=totals,
            train=policy.train,
            reference_logprobs_BL=part.reference_logprobs_BL,
            entropies_BL=entropies_BL if with_entropies else None,
            episode_tokens_B=part.episode_tokens_B,
            teacher_logprobs_BL=part.batch.teacher_logprobs_BL,
        )
        # A clipped ratio hides an infinite log-prob from the loss.
        finite_B = loss_B.isfinite() & logprobs_BL.isfinite().all(dim=1)
        wrong |= {row.episode_id for row, good in zip(part.samples, finite_B, strict=True) if not good}
        total = loss_B.sum()
        total.backward()
        loss += total.item()
        stats += part_stats
    episodes = {row.episode_id for part in minibatch for row in part.samples}
    # Each rank must come to the same end: one that raised alone would leave the others in a collective.
    losses, stats_of_ranks, wrong_of_ranks, episodes_of_ranks = zip(
        *policy.ranks.gather((loss, stats, wrong, episodes)), strict=True
    )
    refuse(set[int]().union(*wrong_of_ranks), what="loss", version=version)
    clipped = torch.nn.utils.clip_grad_norm_(policy.trained().values(), policy.train.grad_clip)
    grad_norm = whole(clipped).item()
    if not np.isfinite(grad_norm):
        raise TrainingError(
            f"step {version} -> {version + 1}: the gradient is {grad_norm} over episodes "
            f"{sorted(set().union(*episodes_of_ranks))}"
        )
    policy.optimizer.step()
    return sum(losses), sum(stats_of_ranks, start=TokenStats()), grad_norm


def refuse(episode_ids: set[int], *, what: str, version: int) -> None:
    """Raise TrainingError for the episodes whose `what` is no finite number, if there are any."""
    if episode_ids:
        raise TrainingError(
            f"step {version} -> {version + 1}: the {what} is not finite in episodes {sorted(episode_ids)}"
        )
