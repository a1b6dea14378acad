"""Episodes become training rows here, and rows become padded batches for the policy.

Legend: B rows of a batch, L positions of a row, T sampled tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import numpy as np
import torch

from common.episode import (
    MAX_LOGPROB,
    ScoredEpisode,
    TurnTokens,
    episode_digest,
    ids_to_bytes,
    logprobs_to_bytes,
    sampled_digest,
)

NO_VERSION = -1
"""Version of a position that nobody sampled."""


RowKey = tuple[int, int]
"""Episode id, and index of the row within the episode."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training row: a token sequence as the engine saw it, prompts and sampled turns in order.

    An episode gives one, and one more for each time that its history was rewritten.
    """

    episode_id: int
    group_id: int
    index: int
    """0, 1, 2 … within the episode."""
    ids_L: np.ndarray
    """int32 token ids."""
    mask_L: np.ndarray
    """bool; True exactly on sampled tokens. Each run of True is one turn."""
    behaviour_logprobs_L: np.ndarray
    """float32 log-probs in nats of the policy that sampled; 0 where the mask is False."""
    versions_L: np.ndarray
    """int32 policy version that sampled the token; NO_VERSION where the mask is False."""
    teacher_logprobs_L: np.ndarray | None = None
    """float32 log-probs in nats of the teacher; 0 where the mask is False; None = no teacher was asked."""

    def __post_init__(self) -> None:
        lengths = {len(self.ids_L), len(self.mask_L), len(self.behaviour_logprobs_L), len(self.versions_L)}
        if len(lengths) != 1:
            raise ValueError(
                f"episode {self.episode_id}: {len(self.ids_L)} ids, {len(self.mask_L)} mask positions, "
                f"{len(self.behaviour_logprobs_L)} log-probs, {len(self.versions_L)} versions"
            )
        if len(self.mask_L) and self.mask_L[0]:
            raise ValueError(f"episode {self.episode_id}: the first token is sampled, but nothing stands before it")
        self._check_logprobs()

    def _check_logprobs(self) -> None:
        logprobs_L = self.behaviour_logprobs_L
        wrong_L = self.mask_L & ~(np.isfinite(logprobs_L) & (logprobs_L <= MAX_LOGPROB))
        if wrong_L.any():
            position = int(wrong_L.argmax())
            raise ValueError(
                f"episode {self.episode_id} row {self.index}: the behaviour log-prob of id {self.ids_L[position]} at "
                f"position {position} is {logprobs_L[position]:g}, it must be finite and at most 0"
            )

    @property
    def key(self) -> RowKey:
        return self.episode_id, self.index

    @property
    def num_tokens(self) -> int:
        """Sampled tokens: those with mask True."""
        return int(self.mask_L.sum())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded on the right to one length. The mask comes from lengths, so a pad id may also be a real token."""

    ids_BL: torch.Tensor
    """int64; 0 in the padding, which stands right of every real token, where causal attention never looks."""
    mask_BL: torch.Tensor
    """bool; True exactly on sampled tokens."""
    behaviour_logprobs_BL: torch.Tensor
    """float32, nats; 0 where the mask is False."""
    lengths_B: torch.Tensor
    """int64; positions of each row without its padding."""
    teacher_logprobs_BL: torch.Tensor | None = None
    """float32, nats; 0 where the mask is False; None without a teacher."""

    @property
    def real_BL(self) -> torch.Tensor:
        """bool; False on the padding."""
        positions_L = torch.arange(self.ids_BL.shape[1], device=self.ids_BL.device)
        return positions_L < self.lengths_B[:, None]

    def to(self, device: torch.device) -> Batch:
        """The batch there."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: value.to(device) for name, value in given.items() if value is not None})


def make_samples(episode: ScoredEpisode) -> list[Sample]:
    """Join the turns of an episode to rows: suffixes with mask False, sampled tokens with mask True, in one row each.

    A history that a later row shows again is given there, not sampled: mask False. An episode without turns gives one
    empty row. Raises ValueError for a turn without suffix or without sampled tokens, which the mask could not tell from
    its neighbours, and for turns whose samples are not 0, 1, 2 … in order.
    """
    for index, turn in enumerate(episode.turns):
        if len(turn.suffix_ids) == 0 or len(turn.sampled_ids) == 0:
            raise ValueError(
                f"episode {episode.episode_id} turn {index}: "
                f"{len(turn.suffix_ids)} suffix ids and {len(turn.sampled_ids)} sampled ids, both must be at least 1"
            )
    by_sample = [(index, list(turns)) for index, turns in groupby(episode.turns, key=lambda turn: turn.sample)]
    if [index for index, _ in by_sample] != list(range(len(by_sample))):
        raise ValueError(f"episode {episode.episode_id}: turns of samples {[turn.sample for turn in episode.turns]}")
    return [_make_sample(episode, index, turns) for index, turns in by_sample or [(0, [])]]


def _make_sample(episode: ScoredEpisode, index: int, turns: Sequence[TurnTokens]) -> Sample:
    parts = [part for turn in turns for part in _parts(turn)]
    ids, mask, logprobs, versions = zip(*parts, strict=True) if parts else ((), (), (), ())
    return Sample(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        index=index,
        ids_L=_join(ids, np.int32),
        mask_L=_join(mask, np.bool_),
        behaviour_logprobs_L=_join(logprobs, np.float32),
        versions_L=_join(versions, np.int32),
    )


def rows_by_episode(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """(episode id, its rows), in order. The rows of an episode must stand together."""
    for episode_id, rows in groupby(samples, key=lambda sample: sample.episode_id):
        yield episode_id, list(rows)


def samples_digest(samples: Sequence[Sample]) -> bytes:
    """sha256 over the digests of an episode's turns, taken from the arrays of all its rows, in order.

    Equal to the digest of what the engine client received, unless a token or a log-prob changed on its way here.
    """
    turn_digests = [
        sampled_digest(ids_to_bytes(sample.ids_L[turn]), logprobs_to_bytes(sample.behaviour_logprobs_L[turn]))
        for sample in samples
        for turn in _sampled_runs(sample)
    ]
    return episode_digest(turn_digests)


def fresh_mask(sample: Sample, version: int) -> np.ndarray:
    """[L] True on the tokens of turns that `version` sampled from start to end.

    A turn that changed versions half-way does not count: its later tokens stand on keys and values of older weights.
    """
    fresh_L = np.zeros(len(sample.ids_L), dtype=np.bool_)
    for turn in _sampled_runs(sample):
        fresh_L[turn] = (sample.versions_L[turn] == version).all()
    return fresh_L


def pad(samples: Sequence[Sample]) -> Batch:
    """Stack rows into one batch of the longest row's length."""
    length = max(len(sample.ids_L) for sample in samples)
    shape = (len(samples), length)
    ids_BL = np.zeros(shape, dtype=np.int64)
    mask_BL = np.zeros(shape, dtype=np.bool_)
    logprobs_BL = np.zeros(shape, dtype=np.float32)
    teacher_BL = None if any(row.teacher_logprobs_L is None for row in samples) else np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(samples):
        end = len(sample.ids_L)
        ids_BL[row, :end] = sample.ids_L
        mask_BL[row, :end] = sample.mask_L
        logprobs_BL[row, :end] = np.where(sample.mask_L, sample.behaviour_logprobs_L, 0)
        if teacher_BL is not None and sample.teacher_logprobs_L is not None:
            teacher_BL[row, :end] = np.where(sample.mask_L, sample.teacher_logprobs_L, 0)
    return Batch(
        ids_BL=torch.from_numpy(ids_BL),
        mask_BL=torch.from_numpy(mask_BL),
        behaviour_logprobs_BL=torch.from_numpy(logprobs_BL),
        lengths_B=torch.tensor([len(sample.ids_L) for sample in samples]),
        teacher_logprobs_BL=None if teacher_BL is None else torch.from_numpy(teacher_BL),
    )


def microbatches(samples: Sequence[Sample], *, max_positions: int, packing: bool = False) -> list[list[Sample]]:
    """Split rows, ordered by length, into batches of at most `max_positions` positions (or one row).

    Padding counts as positions; with `packing` there is none.
    """
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids_L)):
        length = len(sample.ids_L)
        taken = 0
        if batches:
            taken = sum(len(row.ids_L) for row in batches[-1]) if packing else len(batches[-1]) * length
        if batches and taken + length <= max_positions:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def deal(samples: Sequence[Sample], *, parts: int) -> list[list[Sample]]:
    """Rows for each of several ranks, of about as many positions; one part has them all, in their order."""
    if parts == 1:
        return [list(samples)]
    dealt: list[list[Sample]] = [[] for _ in range(parts)]
    positions = [0] * parts
    for sample in sorted(samples, key=lambda sample: (-len(sample.ids_L), sample.episode_id, sample.index)):
        least = positions.index(min(positions))
        dealt[least].append(sample)
        positions[least] += len(sample.ids_L)
    return dealt


def without_sampled(sample: Sample) -> Sample:
    """The row's first position, given and not sampled."""
    return replace(
        sample,
        ids_L=sample.ids_L[:1],
        mask_L=np.zeros(1, dtype=np.bool_),
        behaviour_logprobs_L=np.zeros(1, dtype=np.float32),
        versions_L=np.full(1, NO_VERSION, dtype=np.int32),
        teacher_logprobs_L=None if sample.teacher_logprobs_L is None else np.zeros(1, dtype=np.float32),
    )


def num_tokens_by_episode(samples: Sequence[Sample]) -> Counter[int]:
    """Episode id -> sampled tokens of all its rows."""
    tokens: Counter[int] = Counter()
    for sample in samples:
        tokens[sample.episode_id] += sample.num_tokens
    return tokens


def split_by_group(samples: Sequence[Sample], *, parts: int, randomness: random.Random) -> list[list[Sample]]:
    """Minibatches of whole groups, in random order; siblings stay together, and no part is empty.

    However many rows an episode gives, a step has as many minibatches, and an episode's rows are in one of them.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    shuffled = [groups[group_id] for group_id in sorted(groups)]
    randomness.shuffle(shuffled)
    split = [[sample for group in shuffled[start::parts] for sample in group] for start in range(parts)]
    return [part for part in split if part]


def _sampled_runs(sample: Sample) -> list[slice]:
    """The turns of a row: its runs of mask True, in order."""
    edges = np.flatnonzero(np.diff(sample.mask_L.astype(np.int8), prepend=0, append=0))
    return [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _parts(turn: TurnTokens) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...]:
    """(ids, mask, log-probs, versions) of the suffix, then of the sampled tokens."""
    num_suffix, num_sampled = len(turn.suffix_ids), len(turn.sampled_ids)
    return (
        (turn.suffix_ids, np.zeros(num_suffix, bool), np.zeros(num_suffix), np.full(num_suffix, NO_VERSION)),
        (turn.sampled_ids, np.ones(num_sampled, bool), turn.logprobs, turn.versions),
    )


def _join(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)
