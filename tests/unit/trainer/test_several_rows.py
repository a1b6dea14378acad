"""Episodes of several rows: one reward, one advantage and one weight each, whatever their rows are and come with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.objectives import Row, compute, random_rows
from benchmarks.trainer_check import NUM_EPISODES, NUM_ROWS
from common.config_train import TrainConfig
from common.db.steps import ScoredGroup
from common.episode import ScoredEpisode, TurnTokens
from trainer.loop import account, prepare, rows_of
from trainer.losses import StepTotals, policy_loss
from trainer.policy import Policy
from trainer.samples import Sample, make_samples, num_tokens_by_episode, samples_digest, split_by_group

MakePolicy = Callable[..., Policy]
AVERAGES = ({"average": "token"}, {"average": "episode"}, {"average": "constant", "divisor_tokens": 32})


def turn(sample: int, num_tokens: int, *, given: int = 3, logprob: float = -6.0) -> TurnTokens:
    rng = np.random.default_rng(100 * sample + num_tokens)
    return TurnTokens(
        sample=sample,
        suffix_ids=rng.integers(3, 60, given, dtype=np.int32),
        sampled_ids=rng.integers(3, 60, num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, logprob, np.float32),
        versions=np.zeros(num_tokens, np.int32),
    )


def episode(episode_id: int, *turns: TurnTokens, group_id: int = 1, reward: float = 1.0) -> ScoredEpisode:
    return ScoredEpisode(episode_id=episode_id, group_id=group_id, outcome="finished", reward=reward, turns=turns)


GROUP = ScoredGroup(
    group_id=1,
    episodes=(
        episode(1, turn(0, 2), turn(1, 3), turn(1, 1), turn(2, 4)),
        episode(2, turn(0, 5), reward=0.0),
    ),
)


@pytest.mark.parametrize(
    ("average", "divisors"),
    [
        ({"average": "token"}, [8, 8, 8]),
        ({"average": "episode"}, [4 * 2, 4 * 2, 4 * 2]),
        ({"average": "constant", "divisor_tokens": 10}, [20, 20, 20]),
    ],
    ids=["token", "episode", "constant"],
)
def test_rows_of_an_episode_weigh_together_as_much_as_one_row(average: dict[str, object], divisors: list[int]) -> None:
    """An episode of 4 tokens in rows of 1 and 3, and one of 4 in one row: every token counts the same."""
    logprobs = torch.full((3, 4), -1.0, requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    loss_B, _ = policy_loss(
        logprobs,
        behaviour_logprobs_BL=torch.full((3, 4), -1.0),
        anchor_logprobs_BL=torch.full((3, 4), -1.0),
        advantages_B=torch.tensor([1.0, 1.0, -0.5]),
        mask_BL=mask,
        totals=StepTotals(num_tokens=8, num_episodes=2),
        train=TrainConfig.model_validate(average),
        episode_tokens_B=torch.tensor([4, 4, 4]),
    )
    loss_B.sum().backward()
    assert logprobs.grad is not None
    assert loss_B.tolist() == pytest.approx([-1 / divisors[0], -3 / divisors[1], 2 / divisors[2]])
    expected = torch.tensor([-1.0, -1.0, 0.5])[:, None] * mask / torch.tensor(divisors)[:, None]
    assert torch.allclose(logprobs.grad, expected)


@pytest.mark.parametrize("average", AVERAGES, ids=lambda fields: str(fields["average"]))
def test_cutting_an_episode_into_rows_changes_no_token_s_weight(average: dict[str, object]) -> None:
    train = TrainConfig.model_validate({"anchor": "proximal"} | average)
    whole = random_rows(num_rows=NUM_ROWS, seed=5)
    cut = [piece for row in whole for piece in halves(row)]
    expected = compute(whole, batches=[list(range(NUM_ROWS))], train=train)
    apart = [list(range(first, len(cut), 2)) for first in (1, 0)]
    found = compute(cut, batches=apart, train=train)

    assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-6)
    for index in range(NUM_ROWS):
        together = torch.cat([found.gradients[2 * index], found.gradients[2 * index + 1]])
        assert torch.allclose(together, expected.gradients[index], atol=1e-6)


def halves(row: Row) -> list[Row]:
    """The row cut in two. No token's loss looks at its neighbours here, so only the weights could differ."""
    middle = len(row) // 2
    names = ("logprobs_L", "behaviour_L", "anchor_L", "reference_L", "entropies_L", "mask_L")
    pieces = [
        replace(row, **{name: getattr(row, name).detach()[part].clone() for name in names})
        for part in (slice(0, middle), slice(middle, None))
    ]
    return [piece.to(torch.float32) for piece in pieces]


def test_an_episode_s_rows_share_its_advantage_and_are_trained_and_accounted_for_as_one() -> None:
    samples = rows_of((GROUP,))
    advantages, metrics = prepare(
        (GROUP,), samples, version=0, train=TrainConfig(), reference_kl=lambda rows: pytest.fail("not asked")
    )
    assert [(row.episode_id, row.index) for row in samples] == [(1, 0), (1, 1), (1, 2), (2, 0)]
    assert set(advantages.by_episode) == {1, 2}
    assert (metrics["num_episodes"], metrics["num_rows"], metrics["num_tokens"]) == (2, 4, 15)
    assert (metrics["reward_mean"], metrics["reward_std"]) == (0.5, 0.5)
    trained = account(samples, advantages)
    assert [(entry.episode_id, entry.num_tokens) for entry in trained] == [(1, 10), (2, 5)]
    assert trained[0].digest == samples_digest(make_samples(GROUP.episodes[0]))


def test_more_rows_make_no_more_minibatches_and_no_episode_is_split() -> None:
    rows = [
        row
        for group_id in range(6)
        for number in range(2)
        for row in make_samples(
            episode(2 * group_id + number, *(turn(sample, 2) for sample in range(group_id + 1)), group_id=group_id)
        )
    ]
    for parts in (1, 2, 3):
        minibatches = split_by_group(rows, parts=parts, randomness=random.Random(1))
        assert len(minibatches) == parts
        assert [len({row.group_id for row in part}) for part in minibatches] == [6 // parts] * parts
        assert sorted(row.episode_id for part in minibatches for row in part) == sorted(r.episode_id for r in rows)
    assert num_tokens_by_episode(rows)[11] == 12


def test_every_row_of_an_episode_has_a_gradient_at_its_own_tokens() -> None:
    rows = random_rows(num_rows=NUM_ROWS, num_episodes=NUM_EPISODES, seed=3)
    found = compute(rows, batches=[list(range(NUM_ROWS))], train=TrainConfig(clip_low=0.9, clip_high=50))
    for row, gradient in zip(rows, found.gradients, strict=False):
        assert ((gradient != 0) == (row.mask_L & (row.advantage != 0))).all()


def test_the_distance_to_the_start_weights_is_summed_over_all_rows(make_policy: MakePolicy) -> None:
    policy = make_policy(kl="reward", kl_coefficient=0.1, kl_estimator="k1")
    rows = make_samples(GROUP.episodes[0])
    alone = [policy.reference_kl([row])[1] for row in rows]
    assert policy.reference_kl(rows)[1] == pytest.approx(sum(alone), rel=1e-5)
    assert len(set(alone)) == 3


def test_a_step_does_not_depend_on_the_order_of_rows(make_policy: MakePolicy) -> None:
    rows = [row for one in GROUP.episodes for row in make_samples(one)]
    gradients = [gradient_of(make_policy(average="episode"), ordered) for ordered in (rows, rows[::-1])]
    assert (gradients[1] - gradients[0]).abs().max() <= 1e-6
    assert gradients[0].abs().max() > 1e-3


def gradient_of(policy: Policy, rows: Sequence[Sample]) -> torch.Tensor:
    """Of one training step."""
    policy.train_step(rows, {1: 1.0, 2: -1.0}, version=0)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
