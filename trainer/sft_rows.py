"""Rows to imitate: read from JSON lines, or taken from the rewarded episodes of a run, for trainer.imitation.

Legend: L positions of a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from common.db import runs, turns
from common.db.session import Database
from common.errors import SetupError
from common.model_folder import ModelShape
from common.outcomes import Outcome
from trainer.check_input import check_rows
from trainer.samples import NO_VERSION, Sample, make_samples

MAX_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True)
class WeightedRow:
    """A training row, and how much each of its tokens is to be learned."""

    sample: Sample
    weights_L: np.ndarray
    """float32; above 0 exactly where the sample's mask is True."""
    where: str
    """Where it comes from, for messages."""

    def __post_init__(self) -> None:
        if not np.array_equal(self.weights_L > 0, self.sample.mask_L):
            raise ValueError(f"{self.where}: its weights are not above 0 exactly where its mask is True")

    @classmethod
    def of_ids(cls, ids: Sequence[int | float], weights_L: np.ndarray, *, number: int, where: str) -> Self:
        """A row that nobody sampled; `number` stands for its episode."""
        sample = Sample(
            episode_id=number,
            group_id=number,
            index=0,
            ids_L=np.array(ids, dtype=np.int32),
            mask_L=weights_L > 0,
            behaviour_logprobs_L=np.zeros(len(ids), dtype=np.float32),
            versions_L=np.full(len(ids), NO_VERSION, dtype=np.int32),
        )
        return cls(sample=sample, weights_L=weights_L, where=where)


def read_rows(path: Path, *, shape: ModelShape) -> list[WeightedRow]:
    """Read JSON lines of `ids` and `weights`. Raises SetupError that names the line and the field.

    The first id's weight is without effect: nothing stands before it that it could be learned from.
    """
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_row(json.loads(line.strip()), shape=shape, number=number, where=f"{path}:{number}"))
            except json.JSONDecodeError as error:
                raise SetupError(f"{path}:{number}: not JSON at column {error.colno}: {error.msg}") from None
            except RecursionError:
                raise SetupError(f"{path}:{number}: it is nested too deeply") from None
            except ValueError as error:
                raise SetupError(f"{path}:{number}: {error}") from None
    if not rows:
        raise SetupError(f"{path} has no rows")
    return rows


def rows_of_run(
    database: Database, name: str, *, min_reward: float, model: Path, shape: ModelShape
) -> list[WeightedRow]:
    """The rows of a run's training episodes with at least this reward, exactly as they were sampled, in order.

    Episodes of evaluations are not in it. Raises SetupError where `model` could not learn them, or there are none.
    """
    with database.begin() as conn:
        run = runs.require(conn, name)
        episodes = turns.load_rewarded(conn, run.id, min_reward=min_reward)
    _check_same_tokenizer(model, run.config.model, run=name)
    try:
        samples = [row for one in episodes if Outcome(one.outcome).is_agent for row in make_samples(one)]
        check_rows(samples, context=shape.context, vocab_size=shape.vocab_size)
    except ValueError as error:
        raise SetupError(f"run {name}: {error}") from None
    rows = [
        WeightedRow(
            sample=sample,
            weights_L=sample.mask_L.astype(np.float32),
            where=f"run {name} episode {sample.episode_id} row {sample.index}",
        )
        for sample in samples
        if sample.num_tokens
    ]
    if not rows:
        raise SetupError(
            f"run {name} has no training episode with tokens and a reward of {min_reward:g} or more: "
            "lower --min-reward, or take a run that was not pruned"
        )
    return rows


def _row(value: object, *, shape: ModelShape, number: int, where: str) -> WeightedRow:
    """Raises ValueError that names the field."""
    if not isinstance(value, dict):
        raise ValueError("it is no object with `ids` and `weights`")
    ids, weights = _list(value, "ids"), _list(value, "weights")
    if len(ids) != len(weights):
        raise ValueError(f"weights: there are {len(weights)}, but {len(ids)} ids")
    if shape.context is not None and len(ids) > shape.context:
        raise ValueError(
            f"ids: there are {len(ids)}, more than the {shape.context} positions of the model (max_position_embeddings)"
        )
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < shape.vocab_size:
            raise ValueError(
                f"ids[{index}]: {token_id!r:.40} is not in the model's vocabulary of {shape.vocab_size} (vocab_size)"
            )
    for index, weight in enumerate(weights):
        # NaN is in no range.
        if type(weight) not in (int, float) or not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(f"weights[{index}]: {weight!r:.40} is no number from 0 to {MAX_WEIGHT:g}")
    weights_L = np.array(weights, dtype=np.float32)
    weights_L[:1] = 0
    if not weights_L.any():
        raise ValueError("weights: no id after the first has one above 0, so there is nothing to learn")
    return WeightedRow.of_ids(ids, weights_L, number=number, where=where)


def _list(value: dict[str, object], name: str) -> Sequence[int | float]:
    """Its entries may still be anything."""
    if name not in value:
        raise ValueError(f"{name}: it is missing")
    found = value[name]
    if not isinstance(found, list):
        raise ValueError(f"{name}: {found!r:.40} is no list")
    return found


def _check_same_tokenizer(model: Path, of_run: Path, *, run: str) -> None:
    """Ids of another tokenizer would be learned without complaint; unless its folder is elsewhere, we see that."""
    mine, theirs = model / "tokenizer.json", of_run / "tokenizer.json"
    if theirs.is_file() and mine.read_bytes() != theirs.read_bytes():
        raise SetupError(f"{mine} is another tokenizer than {theirs} of run {run}")
