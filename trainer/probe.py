"""What a step's rows say before it: the policy's entropy, and how far its log-probs are from the engine's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.samples import Sample, fresh_mask, pad
from trainer.update import refuse

if TYPE_CHECKING:
    from trainer.policy import Policy

NUM_PROBED = 32
"""Rows whose log-probs are compared with the engine's at the start of a step."""


@torch.no_grad()
def probe(policy: Policy, samples: Sequence[Sample], *, version: int, randomness: random.Random) -> dict[str, float]:
    """Entropy, and the distance to the engine's log-probs where both had the same weights. All ranks call it.

    Raises TrainingError for episodes of which the policy says what is no number, or calls a token impossible that this
    very version sampled: no loss would show it of rows without an advantage.

    Tokens of turns that this very version sampled from start to end must come out the same here: a gap beyond
    rounding means other ids, other weights or another sampling distribution. Rows with such turns go first. Without
    such tokens there is no logprob_gap_max, without any no entropy.
    """
    candidates = sorted((row for row in samples if row.num_tokens), key=lambda row: row.key)
    randomness.shuffle(candidates)
    candidates.sort(key=lambda row: not fresh_mask(row, version).any())
    gap, num_compared, entropies, wrong = 0.0, 0, [torch.zeros(0)], set[int]()
    for rows in policy.microbatches(candidates[:NUM_PROBED]):
        batch = pad(rows)
        logprobs_BL, entropies_BL = policy.score(batch, with_entropies=True)
        gaps_N = (logprobs_BL - batch.behaviour_logprobs_BL)[batch.mask_BL].abs()
        fresh_N = torch.from_numpy(np.concatenate([fresh_mask(row, version)[row.mask_L] for row in rows]))
        wrong_BL = torch.zeros_like(batch.mask_BL)
        wrong_BL[batch.mask_BL] = gaps_N.isnan() | (fresh_N & gaps_N.isinf())
        wrong |= {row.episode_id for row, bad in zip(rows, wrong_BL.any(dim=1).tolist(), strict=True) if bad}
        gap = max([gap, *gaps_N[fresh_N].tolist()])
        num_compared += int(fresh_N.sum())
        entropies.append(entropies_BL[batch.mask_BL])
    gaps, compared, entropies_of_ranks, wrong_of_ranks = zip(
        *policy.ranks.gather((gap, num_compared, torch.cat(entropies), wrong)), strict=True
    )
    refuse(set[int]().union(*wrong_of_ranks), what="policy's log-prob", version=version)
    found = {"logprob_gap_tokens": float(sum(compared))}
    if any(compared):
        found["logprob_gap_max"] = max(gaps)
    if len(entropy_N := torch.cat(entropies_of_ranks)):
        found["entropy"] = entropy_N.mean().item()
    return found
