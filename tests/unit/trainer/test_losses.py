"""The loss against values computed by hand, the direction of its gradient, and what masks hide."""

from __future__ import annotations

import math

import pytest
import torch

from common.config_train import TrainConfig
from trainer.losses import StepTotals, TokenStats, policy_loss

TRAIN = TrainConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, importance_cap=2.0)


def loss_of(
    logprobs: list[list[float]],
    behaviour: list[list[float]],
    advantages: list[float],
    *,
    anchor: list[list[float]] | None = None,
    mask: list[list[bool]] | None = None,
    num_tokens: int = 1,
    num_episodes: int = 1,
    reference: list[list[float]] | None = None,
    entropies: list[list[float]] | None = None,
    train: TrainConfig = TRAIN,
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
        totals=StepTotals(num_tokens=num_tokens, num_episodes=num_episodes),
        train=train,
        reference_logprobs_BL=None if reference is None else torch.tensor(reference),
        entropies_BL=None if entropies is None else torch.tensor(entropies),
    )
    loss_B.sum().backward()
    assert leaf.grad is not None
    return loss_B.detach(), stats, leaf.grad


def one_token(ratio: float, advantage: float, *, train: TrainConfig = TRAIN) -> tuple[float, float]:
    """(loss, gradient) of one token whose ratio to the behaviour policy is `ratio`."""
    loss_B, _, gradient = loss_of([[math.log(ratio) - 1]], [[-1.0]], [advantage], train=train)
    return loss_B.item(), gradient.item()


def with_fields(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate(TRAIN.model_dump() | fields)


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


def test_empty_mask_gives_a_loss_of_zero_and_no_figures() -> None:
    loss_B, stats, gradient = loss_of([[-1.0]], [[-1.0]], [1.0], mask=[[False]], num_tokens=0)
    assert (loss_B.item(), gradient.item()) == (0.0, 0.0)
    assert stats.metrics() == {}


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
            "importance_max": 1.0,
            "importance_above_fraction": 0.0,
            "importance_below_fraction": 0.0,
            "reference_kl": 0.0,
        },
        abs=1e-6,
    )


def test_figures_of_two_batches_add_up_to_those_of_one() -> None:
    logprobs, behaviour, advantages = [[-1.0], [-0.5], [-3.0]], [[-1.0], [-1.0], [-1.0]], [1.0, 1.0, -1.0]
    whole = loss_of(logprobs, behaviour, advantages)[1]
    first = loss_of(logprobs[:1], behaviour[:1], advantages[:1])[1]
    rest = loss_of(logprobs[1:], behaviour[1:], advantages[1:])[1]
    assert (first + rest).metrics() == pytest.approx(whole.metrics(), abs=1e-6)


def test_plain_ppo_has_one_range_and_no_bound_below() -> None:
    plain = with_fields(clip_high=0.2, dual_clip=1e9)
    assert one_token(1.25, 1.0, train=plain) == pytest.approx((-1.2, 0.0), abs=1e-5)
    assert one_token(40.0, -1.0, train=plain) == pytest.approx((40.0, 40.0), rel=1e-5)


GSPO = with_fields(loss="gspo", average="episode", clip_low=0.1, clip_high=0.1, dual_clip=1e9)


def test_gspo_clips_the_geometric_mean_of_the_row() -> None:
    # Ratios 2 and 1/2 are 1 in the mean: nothing is clipped though each token is far out; the gradient of the mean over
    # two tokens is the same for both.
    behaviour = [[-2.0, -2.0]]
    loss_B, _, gradient = loss_of(
        [[-2.0 + math.log(2), -2.0 - math.log(2)]], behaviour, [3.0], num_episodes=4, train=GSPO
    )
    assert loss_B.tolist() == pytest.approx([-0.75])
    assert gradient.tolist()[0] == pytest.approx([-0.375, -0.375])


def test_gspo_ratio_is_over_the_sampled_tokens_alone_and_clipped_as_one() -> None:
    mask = [[False, True, True]]
    logprobs, behaviour = [[9.0, -2.0 + math.log(1.44), -2.0]], [[0.0, -2.0, -2.0]]
    up, _, of_up = loss_of(logprobs, behaviour, [1.0], mask=mask, train=GSPO)
    down, _, of_down = loss_of(logprobs, behaviour, [-1.0], mask=mask, train=GSPO)
    assert up.item() == pytest.approx(-1.1)
    assert of_up.tolist() == [[0.0, 0.0, 0.0]]
    assert down.item() == pytest.approx(1.2)
    assert of_down.tolist()[0] == pytest.approx([0.0, 0.6, 0.6])


@pytest.mark.parametrize(("loss", "of_high", "of_low", "of_far"), [("ppo", 0.0, 0.0, 0.0), ("cispo", -1.28, 0.8, 1.28)])
def test_what_is_counted_as_clipped_has_no_gradient_but_by_cispo(
    loss: str, of_high: float, of_low: float, of_far: float
) -> None:
    train = with_fields(loss=loss, dual_clip=3.0)
    behaviour = [[-1.0 - math.log(2), -1.0], [-1.0 - math.log(0.5), -1.0 - math.log(4)]]
    _, stats, gradient = loss_of([[-1.0, -1.0], [-1.0, -1.0]], behaviour, [1.0, -1.0], train=train)
    # Ratios 2 and 1 of a good row, 0.5 and 4 of a bad one; the last is beyond the dual clip, and counted nowhere.
    assert gradient.tolist() == [pytest.approx([of_high, -1.0]), pytest.approx([of_low, of_far])]
    assert (stats.clipped_high, stats.clipped_low, stats.num_tokens) == (1, 1, 4)


CISPO = with_fields(loss="cispo", clip_low=1.0, clip_high=4.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.0, 1.0, 1.0), (8.0, 1.0, 5.0), (8.0, -1.0, -5.0), (0.1, -2.0, -0.2), (0.001, 3.0, 0.003), (1.1, -2.0, -2.2)],
)
def test_cispo_token_beyond_the_clip_keeps_a_bounded_gradient_and_an_old_one_its_ratio(
    ratio: float, advantage: float, weight: float
) -> None:
    loss, gradient = one_token(ratio, advantage, train=CISPO)
    assert gradient == pytest.approx(-weight, abs=1e-5)
    assert loss == pytest.approx(-weight * (math.log(ratio) - 1), abs=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("average", ["token", "episode", "constant"])
def test_gradient_raises_good_rows_and_lowers_bad_ones(loss: str, average: str) -> None:
    train = with_fields(
        loss=loss,
        average=average,
        clip_low=0.2,
        clip_high=0.28,
        divisor_tokens=8 if average == "constant" else None,
    )
    _, _, gradient = loss_of([[-1.0, -2.0], [-1.0, -2.0]], [[-1.0, -2.0], [-1.0, -2.0]], [1.0, -1.0], train=train)
    assert (gradient[0] < 0).all()
    assert (gradient[1] > 0).all()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Rows of 3 tokens and of 1, advantages 2 and -4, in a step of 8 tokens and 4 episodes.
        ({"average": "token"}, [-6 / 8, 4 / 8]),
        ({"average": "episode"}, [-2 / 4, 4 / 4]),
        ({"average": "constant", "divisor_tokens": 10}, [-6 / 40, 4 / 40]),
    ],
)
def test_what_the_loss_is_a_mean_of(fields: dict[str, object], expected: list[float]) -> None:
    mask = [[True, True, True], [False, True, False]]
    same = [[-1.0] * 3] * 2
    loss_B, _, _ = loss_of(
        same, same, [2.0, -4.0], mask=mask, num_tokens=8, num_episodes=4, train=with_fields(**fields)
    )
    assert loss_B.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("average", ["token", "episode"])
def test_nothing_to_train_gives_zero_not_nan(average: str) -> None:
    loss_B, _, gradient = loss_of(
        [[-1.0, -1.0]],
        [[-1.0, -1.0]],
        [1.0],
        mask=[[False, False]],
        num_tokens=0,
        num_episodes=0,
        train=with_fields(average=average),
    )
    assert (loss_B.item(), gradient.tolist()) == (0.0, [[0.0, 0.0]])


def test_rows_of_one_episode_have_its_advantage_at_their_own_places() -> None:
    # The first row's tokens stand where the last row has none: an advantage tensor of the last row would be 0 there.
    mask = [[False, True, False, False], [False, False, False, True]]
    same = [[-1.0] * 4] * 2
    _, _, gradient = loss_of(same, same, [2.0, 2.0], mask=mask, num_tokens=2)
    assert gradient.tolist() == [[0.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, -1.0]]


DECOUPLED = {"anchor": "proximal", "importance_cap": 2.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (DECOUPLED, [-2.0, -0.25]),
        (DECOUPLED | {"importance_cap": 8.0}, [-4.0, -0.25]),
        (DECOUPLED | {"correction": "mask"}, [0.0, -0.25]),
        (DECOUPLED | {"correction": "mask", "importance_floor": 0.5}, [0.0, 0.0]),
        (DECOUPLED | {"correction_level": "sequence"}, [-1.0, -1.0]),
        (DECOUPLED | {"correction": "none", "allow_uncorrected": True}, [-1.0, -1.0]),
    ],
    ids=["TIS", "decoupled", "MIS", "IcePop", "sequence TIS", "none"],
)
def test_correction_weighs_each_token(fields: dict[str, object], expected: list[float]) -> None:
    # Policy = anchor, twice: anchor / behaviour is 4, then 1/4; the product is 1.
    behaviour = [[-1.0 - math.log(4), -1.0 + math.log(4)]]
    _, _, gradient = loss_of([[-1.0, -1.0]], behaviour, [1.0], anchor=[[-1.0, -1.0]], train=with_fields(**fields))
    assert gradient.tolist()[0] == pytest.approx(expected, abs=1e-5)


def test_a_sequence_whose_weight_is_above_the_cap_leaves_the_loss() -> None:
    # Of the first the product is 2, of the second 1.
    train = with_fields(**DECOUPLED | {"correction_level": "sequence", "correction": "mask", "importance_cap": 1.5})
    behaviour = [[-1.0 - math.log(4), -1.0 + math.log(2)], [-1.0 - math.log(4), -1.0 + math.log(4)]]
    same = [[-1.0, -1.0]] * 2
    _, _, gradient = loss_of(same, behaviour, [1.0, 1.0], anchor=same, train=train)
    assert gradient.tolist()[0] == [0.0, 0.0]
    assert gradient.tolist()[1] == pytest.approx([-1.0, -1.0], abs=1e-5)


def test_figures_of_the_correction_are_of_raw_weights() -> None:
    train = with_fields(**DECOUPLED, correction="mask", importance_floor=0.5)
    behaviour = [[-1.0 - math.log(ratio) for ratio in (4.0, 1.0, 0.25, 0.4)]]
    _, stats, _ = loss_of([[-1.0] * 4], behaviour, [1.0], anchor=[[-1.0] * 4], train=train)
    assert stats.importance_max == pytest.approx(4.0)
    assert (stats.importance_above, stats.importance_below) == (1, 2)
    assert stats.metrics()["importance_below_fraction"] == 0.5


@pytest.mark.parametrize(
    ("estimator", "loss", "gradient"),
    # d = log(1/2): k2 = d^2 / 2, gradient d; k3 = 2 - 1 - log 2, gradient 1 - 2
    [("k2", math.log(2) ** 2 / 2, -math.log(2)), ("k3", 1 - math.log(2), -1.0)],
)
def test_kl_in_the_loss_pulls_towards_the_start_weights(estimator: str, loss: float, gradient: float) -> None:
    train = with_fields(kl="loss", kl_coefficient=0.5, kl_estimator=estimator)
    low = [[-1.0 - math.log(2), 5.0]]
    loss_B, stats, found = loss_of(
        low, low, [0.0], reference=[[-1.0, math.nan]], mask=[[True, False]], num_tokens=4, train=train
    )
    assert loss_B.item() == pytest.approx(0.5 * loss / 4, abs=1e-6)
    assert found.tolist()[0] == pytest.approx([0.5 * gradient / 4, 0.0], abs=1e-6)
    assert stats.metrics()["reference_kl"] == pytest.approx(loss, abs=1e-6)


def test_entropy_is_a_bonus() -> None:
    train = with_fields(entropy_coefficient=0.1)
    same = [[-1.0, -1.0, -1.0]]
    loss_B, _, _ = loss_of(
        same, same, [0.0], entropies=[[2.0, 3.0, math.nan]], mask=[[True, True, False]], num_tokens=4, train=train
    )
    assert loss_B.item() == pytest.approx(-0.1 * 5.0 / 4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_what_is_not_finite_under_the_mask_shows_in_its_row_alone(poison: float, loss: str) -> None:
    train = with_fields(loss=loss, clip_low=0.2, clip_high=0.28)
    loss_B, _, _ = loss_of([[-1.0, poison], [-1.0, -1.0]], [[-1.0, -1.0]] * 2, [1.0, 1.0], train=train)
    # A clip bounds an infinite ratio; policy.py looks at the log-probs themselves.
    assert loss_B[0].isfinite() == (poison == math.inf and loss != "cispo")
    assert loss_B[1].isfinite()
