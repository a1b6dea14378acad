"""Importance weights by hand: truncated and masked, of tokens and of rows."""

from __future__ import annotations

import math

import pytest
import torch

from common.config_train import TrainConfig
from trainer.importance import importance


def weights_of(rows: list[list[float]], **train: object) -> list[list[float]]:
    """Weights where anchor / behaviour is as given."""
    log_ratio = torch.tensor(rows, dtype=torch.float64).log()
    config = TrainConfig.model_validate({"anchor": "proximal"} | train)
    weight_BL = importance(log_ratio - 1, torch.full_like(log_ratio, -1.0), train=config).weight_BL
    return [[round(weight, 9) for weight in row] for row in weight_BL.tolist()]


RATIOS = [[5.0, 0.5, 0.1, 1.0], [3.0, 0.5, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, [[2.0, 0.5, 0.1, 1.0], [2.0, 0.5, 1.0, 1.0]]),
        ({"correction": "mask"}, [[0.0, 0.5, 0.1, 1.0], [0.0, 0.5, 1.0, 1.0]]),
        ({"correction": "mask", "importance_floor": 0.2}, [[0.0, 0.5, 0.0, 1.0], [0.0, 0.5, 1.0, 1.0]]),
        ({"correction_level": "sequence"}, [[0.25] * 4, [1.5] * 4]),
        ({"correction_level": "sequence", "importance_cap": 1.2}, [[0.25] * 4, [1.2] * 4]),
        ({"correction_level": "sequence", "correction": "mask", "importance_cap": 1.2}, [[0.25] * 4, [0.0] * 4]),
        (
            {"correction_level": "sequence", "correction": "mask", "importance_floor": 0.5},
            [[0.0] * 4, [1.5] * 4],
        ),
        ({"correction": "none", "allow_uncorrected": True}, [[1.0] * 4] * 2),
    ],
    ids=["TIS", "MIS", "IcePop", "sequence TIS", "sequence TIS cut", "sequence MIS", "sequence both sides", "none"],
)
def test_weights_by_hand(train: dict[str, object], expected: list[list[float]]) -> None:
    assert weights_of(RATIOS, **train) == expected


def test_figures_are_of_the_weights_before_the_cap() -> None:
    log_ratio = torch.tensor(RATIOS).log()
    found = importance(log_ratio, torch.zeros_like(log_ratio), train=TrainConfig(anchor="proximal"))
    assert found.raw_BL[0, 0].item() == pytest.approx(5.0)
    assert found.weight_BL.max().item() == 2.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_huge_log_ratio_does_not_become_infinite(level: str) -> None:
    log_ratio = torch.tensor([[500.0, 400.0], [-500.0, -400.0]])
    train = TrainConfig.model_validate({"anchor": "proximal", "correction_level": level, "importance_cap": 1e12})
    weight_BL = importance(log_ratio, torch.zeros_like(log_ratio), train=train).weight_BL
    assert weight_BL[:, 0].tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
