"""The loss against values computed by hand, the direction of its gradient, and what masks hide."""

from __future__ import annotations

import math

import pytest
import torch

from common.config import TrainConfig
from trainer.losses import TokenStats, policy_loss

TRAIN = TrainConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, importance_cap=2.0)


def loss_of(
    logprobs: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    *,
    anchor: list[list[float]] | None = None,
    mask: list[list[bool]] | None = None,
    num_tokens: int = 1,
) -> tuple[torch.Tensor, TokenStats, torch.Tensor]:
    """(loss [B], figures, gradient [B, L])."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    mask_BL = torch.ones(leaf.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss_B, stats = policy_loss(
        leaf,
        behaviour_logprobs_BL=torch.tensor(behaviour),
        anchor_logprobs_BL=torch.tensor(behaviour if anchor is None else anchor),
        advantages_B=torch.tensor(advantages),
        mask_BL=mask_BL,
        num_tokens=num_tokens,
        train=TRAIN,
    )
    loss_B.sum().backward()
    assert leaf.grad is not None
    return loss_B.detach(), stats, leaf.grad


def one_token(ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, gradient) of one token whose ratio to the behaviour policy is `ratio`."""
    loss_B, _, gradient = loss_of([[math.log(ratio) - 1]], [[-1.0]], [advantage])
    return loss_B.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.27, 1.0, -1.27, -1.27),
        (1.29, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.81, -1.0, 0.81, 0.81),
        (0.79, -1.0, 0.8, 0.0),
        (2.9, -1.0, 2.9, 2.9),
        (3.1, -1.0, 3.0, 0.0),
    ],
    ids=["up", "down", "below high", "above high", "far below", "above low", "below low", "below dual", "above dual"],
)
def test_value_and_gradient_at_the_clip_edges(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert one_token(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


def test_descent_raises_good_tokens_and_lowers_bad_ones() -> None:
    _, _, gradient = loss_of([[-1.0, -2.0], [-1.0, -2.0]], [[-1.0, -2.0], [-1.0, -2.0]], [1.0, -1.0])
    assert (gradient[0] < 0).all()
    assert (gradient[1] > 0).all()


def test_divisor_is_the_given_count_of_the_whole_step() -> None:
    loss_B, _, _ = loss_of([[-1.0, -1.0, -1.0]], [[-1.0, -1.0, -1.0]], [2.0], num_tokens=12)
    assert loss_B.tolist() == pytest.approx([-0.5])


def test_rows_add_up_token_by_token_not_row_by_row() -> None:
    mask = [[True, True, True], [False, True, False]]
    behaviour = [[-1.0] * 3] * 2
    loss_B, stats, gradient = loss_of(behaviour, behaviour, [1.0, -3.0], mask=mask, num_tokens=4)
    assert loss_B.tolist() == pytest.approx([-0.75, 0.75])
    assert gradient.tolist() == [[-0.25, -0.25, -0.25], [0.0, 0.75, 0.0]]
    assert stats.num_tokens == 4


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_outside_the_mask_are_never_seen(poison: float) -> None:
    mask = [[False, True]]
    clean = loss_of([[0.0, -1.0]], [[0.0, -1.125]], [1.0], mask=mask)
    dirty = loss_of([[poison, -1.0]], [[poison, -1.125]], [1.0], anchor=[[poison, -1.125]], mask=mask)
    assert dirty[0].tolist() == clean[0].tolist()
    assert dirty[1] == clean[1]
    assert dirty[2].tolist() == clean[2].tolist() == [[0.0, pytest.approx(-math.exp(0.125))]]


def test_empty_mask_gives_zero_not_nan() -> None:
    loss_B, stats, gradient = loss_of([[-1.0]], [[-1.0]], [1.0], mask=[[False]], num_tokens=0)
    assert (loss_B.item(), gradient.item()) == (0.0, 0.0)
    assert set(stats.metrics().values()) == {0.0}


def test_huge_log_ratio_stays_finite_and_shows_in_the_figures() -> None:
    loss_B, stats, gradient = loss_of([[-1.0]], [[-1000.0]], [-1.0])
    assert (loss_B.item(), gradient.item()) == (3.0, 0.0)
    assert stats.ratio_max == pytest.approx(math.exp(20), rel=1e-5)


def test_decoupled_loss_clips_against_the_anchor_and_weighs_by_the_behaviour() -> None:
    # policy = anchor: ratio 1 with gradient; anchor/behaviour = 1.5 is the weight
    loss_B, _, gradient = loss_of([[-1.0]], [[-1.0 - math.log(1.5)]], [1.0], anchor=[[-1.0]])
    assert (loss_B.item(), gradient.item()) == pytest.approx((-1.5, -1.5))


def test_importance_weight_is_truncated_from_above_only() -> None:
    for ratio, weight in ((5.0, 2.0), (0.1, 0.1)):
        loss_B, _, _ = loss_of([[-1.0]], [[-1.0 - math.log(ratio)]], [1.0], anchor=[[-1.0]])
        assert loss_B.item() == pytest.approx(-weight)


def test_figures_by_hand() -> None:
    ratios, advantages = [1.0, 1.5, 0.5, 4.0], [1.0, 1.0, -1.0, -1.0]
    _, stats, _ = loss_of([[math.log(ratio) - 1] for ratio in ratios], [[-1.0]] * 4, advantages)
    assert stats.metrics() == pytest.approx(
        {
            "ratio_mean": 1.75,
            "ratio_max": 4.0,
            "clip_low_fraction": 0.25,
            "clip_high_fraction": 0.25,
            "approx_kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 4,
        },
        abs=1e-6,
    )


def test_figures_of_two_batches_add_up_to_those_of_one() -> None:
    logprobs, behaviour, advantages = [[-1.0], [-0.5], [-3.0]], [[-1.0], [-1.0], [-1.0]], [1.0, 1.0, -1.0]
    whole = loss_of(logprobs, behaviour, advantages)[1]
    first = loss_of(logprobs[:1], behaviour[:1], advantages[:1])[1]
    rest = loss_of(logprobs[1:], behaviour[1:], advantages[1:])[1]
    assert (first + rest).metrics() == pytest.approx(whole.metrics(), abs=1e-6)
