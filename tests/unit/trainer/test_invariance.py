"""A step's loss and gradients do not depend on how its rows are padded, ordered and split, whatever the objective."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.objectives import compute, objectives, random_rows
from benchmarks.trainer_check import MAX_DIFFERENCE, NUM_EPISODES, NUM_ROWS, invariance
from common.config_train import TrainConfig


@pytest.mark.parametrize("train", objectives(), ids=lambda train: str(train.model_dump(exclude_defaults=True)))
def test_packing_changes_nothing(train: TrainConfig) -> None:
    found = invariance(random_rows(num_rows=NUM_ROWS, num_episodes=NUM_EPISODES, seed=11), train)
    assert {name: difference for name, difference in found.items() if difference > MAX_DIFFERENCE} == {}


def test_the_comparison_sees_one_token_of_another_row() -> None:
    rows = random_rows(num_rows=NUM_ROWS, seed=11)
    together = [list(range(NUM_ROWS))]
    expected = compute(rows, batches=together, train=TrainConfig())
    moved = replace(rows[0], mask_L=rows[0].mask_L & (torch.arange(len(rows[0])) != rows[0].mask_L.nonzero()[-1]))
    assert compute([moved, *rows[1:]], batches=together, train=TrainConfig()).distance(expected) > 100 * MAX_DIFFERENCE
