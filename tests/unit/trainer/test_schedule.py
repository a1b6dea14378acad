"""The learning rate by hand: warm-up, the ways down, and runs that are shorter than either."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from common.config_train import TrainConfig
from trainer.policy import Policy
from trainer.samples import Sample
from trainer.schedule import learning_rate, warn_of_warm_up

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]


def rates_of(**train: object) -> list[float]:
    given = TrainConfig.model_validate({"learning_rate": 8.0, "warmup_steps": 2, "num_versions": 7, **train})
    return [learning_rate(given, version) for version in range(given.num_versions)]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, [4, 8, 8, 7, 6, 5, 4]),
        ({"lr_end": 0.0}, [4, 8, 8, 6, 4, 2, 0]),
        ({"lr_end": 1.0}, [4, 8, 8, 8, 8, 8, 8]),
        ({"lr_schedule": "constant"}, [4, 8, 8, 8, 8, 8, 8]),
        # cos(pi / 4) is sqrt(1/2).
        (
            {"lr_schedule": "cosine", "lr_end": 0.0},
            [4, 8, 8, 4 + 4 * math.sqrt(0.5), 4, 4 - 4 * math.sqrt(0.5), 0],
        ),
        ({"lr_schedule": "cosine"}, [4, 8, 8, 6 + 2 * math.sqrt(0.5), 6, 6 - 2 * math.sqrt(0.5), 4]),
        ({"warmup_steps": 0}, [8 - 4 * version / 6 for version in range(7)]),
        # Two steps after the warm-up, one, none, and a warm-up that is longer than the run.
        ({"num_versions": 4}, [4, 8, 8, 4]),
        ({"num_versions": 3}, [4, 8, 8]),
        ({"num_versions": 2, "lr_schedule": "cosine"}, [4, 8]),
        ({"num_versions": 3, "warmup_steps": 8}, [1, 2, 3]),
        ({"num_versions": 1, "warmup_steps": 0}, [8]),
        ({"num_versions": 1, "warmup_steps": 0, "lr_schedule": "cosine", "lr_end": 0.0}, [8]),
        ({"num_versions": 1}, [4]),
    ],
    ids=str,
)
def test_rates_by_hand(train: dict[str, object], expected: list[float]) -> None:
    assert rates_of(**train) == pytest.approx(expected, abs=1e-12)


def test_learning_rate_warms_up_then_falls_to_half() -> None:
    train = TrainConfig(learning_rate=1e-3, warmup_steps=4, num_versions=15)
    rates = [learning_rate(train, version) for version in range(15)]
    assert rates[:5] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])
    assert rates[9] == pytest.approx(0.75e-3)
    assert rates[14] == pytest.approx(0.5e-3)


def test_the_default_is_bit_for_bit_the_line_to_half_the_rate() -> None:
    given = TrainConfig()
    after = range(5, 40)
    assert [learning_rate(given, version) for version in after] == [
        1e-3 * (1 - 0.5 * (version - 5) / 34) for version in after
    ]


def test_a_run_that_ends_in_its_warm_up_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for num_versions in (0, 4, 6):
        warn_of_warm_up(7, train=TrainConfig(num_versions=num_versions))
    assert caplog.messages == [
        "the run ends in its warm-up run=7 num_versions=4 warmup_steps=5: the last step's learning rate is 0.0008"
    ]


def test_weight_decay_takes_its_share_off_every_weight_and_the_gradient_does_not_see_it(
    make_policy: MakePolicy, make_random_sample: MakeSample
) -> None:
    rows = [make_random_sample(number, policy=make_policy()) for number in (1, 2)]
    plain, decayed = (make_policy(weight_decay=decay, learning_rate=0.01, warmup_steps=0) for decay in (0.0, 0.1))
    before = [parameter.detach().clone() for parameter in plain.model.parameters()]
    metrics = [policy.train_step(rows, {1: 1.0, 2: -1.0}, version=0) for policy in (plain, decayed)]
    assert metrics[0] == metrics[1]
    for start, without, with_decay in zip(before, plain.model.parameters(), decayed.model.parameters(), strict=True):
        torch.testing.assert_close(without - with_decay, 0.01 * 0.1 * start, atol=1e-7, rtol=1e-4)
