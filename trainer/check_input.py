"""What a step was given, checked before it is trained or kept: each mistake is one line with the id and the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import SupportsFloat

from common.db.steps import ScoredGroup
from common.episode import MAX_REWARD
from common.storable import check_storable
from trainer.samples import Sample


def check_groups(groups: Sequence[ScoredGroup], *, max_size: int) -> None:
    """Raise ValueError for a group without episodes or of more than were made, and for a reward that no step can train.

    Rewards are finite numbers of magnitude <= MAX_REWARD.
    """
    for group in groups:
        if not group.episodes:
            raise ValueError(f"group {group.group_id}: it has no scored episode")
        if len(group.episodes) > max_size:
            raise ValueError(
                f"group {group.group_id}: it has {len(group.episodes)} scored episodes, but "
                f"rollout.group_size + rollout.oversample = {max_size}"
            )
        for episode in group.episodes:
            reward: object = episode.reward
            if isinstance(reward, bool) or not isinstance(reward, Real) or not abs(float(reward)) <= MAX_REWARD:
                raise ValueError(
                    f"group {group.group_id} episode {episode.episode_id}: reward must be a finite number from "
                    f"{-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}, got {reward!r}"
                )


def check_rows(samples: Sequence[Sample], *, context: int | None, vocab_size: int) -> None:
    """Raise ValueError for a row that the model has no positions for, or an id that it has no embedding for.

    Models with rotary positions would compute such a row without complaint, and wrongly.
    """
    for sample in samples:
        where = f"episode {sample.episode_id} row {sample.index}"
        if context is not None and len(sample.ids_L) > context:
            raise ValueError(
                f"{where}: its {len(sample.ids_L)} ids are more than the {context} positions of the model "
                "(max_position_embeddings): give engines no longer context, or set rollout.max_row_tokens"
            )
        if len(sample.ids_L) and not 0 <= sample.ids_L.min() <= sample.ids_L.max() < vocab_size:
            odd = next(int(token_id) for token_id in sample.ids_L if not 0 <= token_id < vocab_size)
            raise ValueError(
                f"{where}: id {odd} is not in the model's vocabulary of {vocab_size} (vocab_size): "
                "the engine serves another model"
            )


def checked_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """The same with plain numbers. Raises ValueError for one that is no finite number, or a name that can't be kept."""
    plain = {}
    for name, value in metrics.items():
        given: object = value
        try:
            check_storable(name)
        except ValueError as error:
            raise ValueError(f"metrics: {error}") from None
        if not isinstance(given, Real) or not isfinite(given):
            raise ValueError(f"metrics: {name} = {given!r:.80} is not a finite number")
        plain[name] = float(given)
    return plain
