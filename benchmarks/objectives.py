"""Every kind of objective on random rows, computed in other packings, splits and precisions; for trainer_check.py.

Legend: R rows of a step, B rows of a batch, L positions of a row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from common.config_train import TrainConfig
from trainer.losses import StepTotals, policy_loss

Fields = Sequence[Mapping[str, object]]
"""Choices of one kind: fields of a TrainConfig."""
LOSSES: Fields = (
    {"loss": "ppo"},
    {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.28},
)
AVERAGES: Fields = ({"average": "token"}, {"average": "episode"}, {"average": "constant", "divisor_tokens": 32})
CORRECTIONS: Fields = (
    {},
    {"anchor": "proximal"},
    {"anchor": "proximal", "correction": "mask", "importance_cap": 1.3},
    {"anchor": "proximal", "correction": "mask", "importance_cap": 1.3, "importance_floor": 0.8},
    {"anchor": "proximal", "correction_level": "sequence"},
    {"anchor": "proximal", "correction_level": "sequence", "correction": "mask", "importance_floor": 0.5},
)
PENALTIES: Fields = (
    {},
    {"kl": "loss", "kl_coefficient": 0.1, "kl_estimator": "k2"},
    {"kl": "loss", "kl_coefficient": 0.1, "kl_estimator": "k3", "entropy_coefficient": 0.01},
)
TEACHER: Mapping[str, object] = {"distill": {"teacher": "any", "weight": 0.5}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence with all that its loss is made of; everything is NaN outside the mask."""

    logprobs_L: torch.Tensor
    """A leaf: its gradient is compared."""
    behaviour_L: torch.Tensor
    anchor_L: torch.Tensor
    reference_L: torch.Tensor
    teacher_L: torch.Tensor
    entropies_L: torch.Tensor
    """A leaf."""
    mask_L: torch.Tensor
    advantage: float
    episode: int
    """Rows of one episode have one advantage and one weight in the loss."""

    def __len__(self) -> int:
        return len(self.mask_L)

    def to(self, dtype: torch.dtype) -> Row:
        """The same numbers in another precision, with leaves of their own."""
        floats = ("logprobs_L", "behaviour_L", "anchor_L", "reference_L", "teacher_L", "entropies_L")
        changed = replace(self, **{name: getattr(self, name).detach().to(dtype, copy=True) for name in floats})
        changed.logprobs_L.requires_grad_()
        changed.entropies_L.requires_grad_()
        return changed


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a step came to."""

    loss: torch.Tensor
    """[]"""
    gradients: tuple[torch.Tensor, ...]
    """Of the log-probs of each row, in the order of the rows, then of their entropies."""

    def distance(self, other: Computed) -> float:
        """Largest absolute difference of the losses and of any gradient."""
        pairs = zip((self.loss, *self.gradients), (other.loss, *other.gradients), strict=True)
        return max(float((mine.double() - theirs.double()).abs().max()) for mine, theirs in pairs)


def objectives() -> list[TrainConfig]:
    """All kinds, once each."""
    kinds = [
        *itertools.product(LOSSES, AVERAGES, CORRECTIONS, PENALTIES),
        *itertools.product(LOSSES, CORRECTIONS, [TEACHER]),
    ]
    return [TrainConfig.model_validate({key: value for part in kind for key, value in part.items()}) for kind in kinds]


def random_rows(*, num_rows: int, seed: int, num_episodes: int | None = None) -> list[Row]:
    """Rows of 2 to 40 positions of several turns, some without any sampled token; a third has advantage 0.

    They belong to `num_episodes` episodes, in turn; None = one each.
    """
    generator = torch.Generator().manual_seed(seed)
    advantages: list[float] = []

    def noise(length: int, *, scale: float) -> torch.Tensor:
        return scale * torch.randn(length, generator=generator)

    rows = []
    for index in range(num_rows):
        episode = index % (num_episodes or num_rows)
        length = int(torch.randint(2, 41, (1,), generator=generator))
        mask_L = torch.rand(length, generator=generator) < (0.0 if index % 7 == 6 else 0.6)
        behaviour_L = -torch.rand(length, generator=generator) * 3 - 0.1
        anchor_L = behaviour_L + noise(length, scale=0.2)
        if episode == len(advantages):
            advantages.append(0.0 if index % 3 == 2 else float(noise(1, scale=1.0)))
        row = Row(
            logprobs_L=_poisoned(anchor_L + noise(length, scale=0.3), mask_L),
            behaviour_L=_poisoned(behaviour_L, mask_L),
            anchor_L=_poisoned(anchor_L, mask_L),
            reference_L=_poisoned(behaviour_L + noise(length, scale=0.3), mask_L),
            teacher_L=_poisoned(behaviour_L.flip(0), mask_L),
            entropies_L=_poisoned(torch.rand(length, generator=generator) * 2, mask_L),
            mask_L=mask_L,
            advantage=advantages[episode],
            episode=episode,
        )
        rows.append(row.to(torch.float32))
    return rows


def compute(rows: Sequence[Row], *, batches: Sequence[Sequence[int]], train: TrainConfig, extra: int = 0) -> Computed:
    """Loss and gradients of a step whose rows come in the given batches, each padded by `extra` positions more."""
    for row in rows:
        row.logprobs_L.grad = row.entropies_L.grad = None
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.episode] += int(row.mask_L.sum())
    totals = StepTotals(num_tokens=tokens.total(), num_episodes=sum(map(bool, tokens.values())))
    loss = torch.zeros((), dtype=rows[0].logprobs_L.dtype)
    for batch in batches:
        part = batch_loss([rows[i] for i in batch], tokens=tokens, totals=totals, train=train, extra=extra)
        part.backward()
        loss += part.detach()
    return Computed(loss=loss, gradients=gradients(rows))


def gradients(rows: Sequence[Row]) -> tuple[torch.Tensor, ...]:
    """Of the log-probs of each row, then of their entropies; 0 where the loss does not depend on them."""
    leaves = [row.logprobs_L for row in rows] + [row.entropies_L for row in rows]
    return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in leaves)


def batch_loss(
    rows: Sequence[Row], *, tokens: Mapping[int, int], totals: StepTotals, train: TrainConfig, extra: int = 0
) -> torch.Tensor:
    """[] the loss of some rows of a step, padded with NaN to one length; `tokens` are those of each episode."""
    length = max(len(row) for row in rows) + extra

    def padded(parts: Iterator[torch.Tensor], *, fill: float) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(part, (0, length - len(part)), value=fill) for part in parts])

    loss_B, _ = policy_loss(
        padded((row.logprobs_L for row in rows), fill=torch.nan),
        behaviour_logprobs_BL=padded((row.behaviour_L for row in rows), fill=torch.nan),
        anchor_logprobs_BL=padded((row.anchor_L for row in rows), fill=torch.nan),
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=rows[0].logprobs_L.dtype),
        mask_BL=padded((row.mask_L for row in rows), fill=False),
        totals=totals,
        train=train,
        reference_logprobs_BL=padded((row.reference_L for row in rows), fill=torch.nan),
        entropies_BL=padded((row.entropies_L for row in rows), fill=torch.nan),
        episode_tokens_B=torch.tensor([tokens[row.episode] for row in rows]),
        teacher_logprobs_BL=padded((row.teacher_L for row in rows), fill=torch.nan),
    )
    return loss_B.sum()


def _poisoned(values_L: torch.Tensor, mask_L: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_L, values_L, torch.nan)
