"""The policy computes the log-probs of the sampling distribution, and a step moves them where advantages point."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import RunConfig
from common.errors import SetupError
from trainer.advantages import GroupRewards, step_advantages
from trainer.losses import StepTotals, policy_loss
from trainer.policy import Policy
from trainer.samples import Sample, pad, split_by_group
from trainer.update import TrainingError

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]


def logprobs_of(policy: Policy, sample: Sample) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(policy.logprobs(pad([sample]))[0])[sample.mask_L]


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def gradient_of(policy: Policy, packing: Sequence[Sequence[Sample]]) -> torch.Tensor:
    """Gradient of the loss over all rows, computed in the given batches; advantages alternate by episode."""
    policy.optimizer.zero_grad()
    all_rows = [row for rows in packing for row in rows]
    totals = StepTotals(num_tokens=sum(row.num_tokens for row in all_rows), num_episodes=len(all_rows))
    for rows in packing:
        batch = pad(rows)
        loss_B, _ = policy_loss(
            policy.logprobs(batch),
            behaviour_logprobs_BL=batch.behaviour_logprobs_BL,
            anchor_logprobs_BL=batch.behaviour_logprobs_BL,
            advantages_B=torch.tensor([1.0 if row.episode_id % 2 else -0.5 for row in rows]),
            mask_BL=batch.mask_BL,
            totals=totals,
            train=policy.train,
        )
        loss_B.sum().backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in policy.model.parameters() if parameter.grad is not None]
    )


def replace_by_nothing(sample: Sample) -> Sample:
    """The row of an episode that never sampled."""
    names = ("ids_L", "mask_L", "behaviour_logprobs_L", "versions_L")
    return replace(sample, **{name: getattr(sample, name)[:0] for name in names})


ADVANTAGES = {1: 1.0, 2: -1.0, 3: -1.0, 4: 1.0}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(
    make_policy: MakePolicy, make_random_sample: MakeSample, temperature: float
) -> None:
    policy, sample = make_policy(temperature=temperature), make_random_sample(1)
    ids = sample.ids_L.tolist()
    expected = []
    for position in np.flatnonzero(sample.mask_L):
        with torch.no_grad():
            logits_V = policy.model(torch.tensor([ids[:position]])).logits[0, -1]
        expected.append((logits_V / temperature).log_softmax(-1)[ids[position]].item())
    np.testing.assert_allclose(logprobs_of(policy, sample), expected, atol=1e-5)


def test_logprobs_are_zero_outside_the_mask(make_policy: MakePolicy, make_random_sample: MakeSample) -> None:
    sample = make_random_sample(1)
    logprobs_L = make_policy().logprobs(pad([sample, make_random_sample(2, length=40)]))[0]
    assert logprobs_L.nonzero()[:, 0].tolist() == np.flatnonzero(sample.mask_L).tolist()


def test_padding_does_not_change_logprobs(make_policy: MakePolicy, make_random_sample: MakeSample) -> None:
    policy, sample = make_policy(), make_random_sample(1)
    with torch.no_grad():
        padded_L = policy.logprobs(pad([make_random_sample(2, length=200), sample]))[1]
    padded = padded_L.numpy()[: len(sample.ids_L)][sample.mask_L]
    np.testing.assert_allclose(padded, logprobs_of(policy, sample), atol=1e-6)


def test_gradient_does_not_depend_on_packing(make_policy: MakePolicy, group: list[Sample]) -> None:
    policy = make_policy()
    together = gradient_of(policy, [group])
    assert together.abs().max() > 1e-3
    for packing in ([[row] for row in group], [group[:1], group[1:]], [list(reversed(group))]):
        np.testing.assert_allclose(gradient_of(policy, packing), together, atol=1e-6)


def test_step_raises_good_episodes_and_lowers_bad_ones(make_policy: MakePolicy, group: list[Sample]) -> None:
    policy = make_policy()
    before = {row.episode_id: logprobs_of(policy, row).sum() for row in group}
    policy.train_step(group, ADVANTAGES, version=5)
    for row in group:
        assert np.sign(logprobs_of(policy, row).sum() - before[row.episode_id]) == ADVANTAGES[row.episode_id]


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_first_update_has_ratio_one_to_its_anchor(make_policy: MakePolicy, group: list[Sample], anchor: str) -> None:
    metrics = make_policy(anchor=anchor, minibatches=1).train_step(group, ADVANTAGES, version=0)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)


def test_proximal_anchor_weighs_tokens_by_their_staleness(make_policy: MakePolicy, group: list[Sample]) -> None:
    stale = [replace(row, behaviour_logprobs_L=row.behaviour_logprobs_L - np.log(1.5)) for row in group]
    fresh_norm = make_policy(anchor="proximal", minibatches=1).train_step(group, ADVANTAGES, version=0)["grad_norm"]
    metrics = make_policy(anchor="proximal", minibatches=1).train_step(stale, ADVANTAGES, version=0)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(1.5 * fresh_norm, rel=1e-4)


def test_every_minibatch_has_the_anchor_of_the_step_s_start(make_policy: MakePolicy, group: list[Sample]) -> None:
    # The rows are the start weights' own, so that both anchors are the same numbers, and have the same step.
    train = {"minibatches": 2, "learning_rate": 0.01, "warmup_steps": 0}
    behaviour, proximal = (
        make_policy(anchor=anchor, **train).train_step(group, ADVANTAGES, version=0)
        for anchor in ("behaviour", "proximal")
    )
    # The first minibatch's ratios are 1: only after its update the second's are not.
    assert proximal["ratio_max"] > 1.2
    assert proximal["clip_high_fraction"] + proximal["clip_low_fraction"] > 0
    assert proximal == pytest.approx(behaviour, rel=1e-4, abs=1e-5)


def test_rows_without_advantage_do_not_pull_but_count_in_the_divisor(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    only_first = {1: 1.0, 2: -1.0, 3: 0.0, 4: 0.0}
    alone = make_policy(minibatches=1).train_step(group[:2], only_first, version=0)["grad_norm"]
    shared = make_policy(minibatches=1).train_step(group, only_first, version=0)["grad_norm"]
    share = sum(row.num_tokens for row in group[:2]) / sum(row.num_tokens for row in group)
    assert shared == pytest.approx(share * alone, rel=1e-4)


def test_step_without_any_advantage_leaves_the_weights_alone(make_policy: MakePolicy, group: list[Sample]) -> None:
    policy = make_policy()
    before = weights_of(policy)
    metrics = policy.train_step(group, dict.fromkeys(ADVANTAGES, 0.0), version=0)
    assert torch.equal(weights_of(policy), before)
    assert (metrics["loss"], metrics["grad_norm"], metrics["num_updates"]) == (0.0, 0.0, 0)
    assert not {"ratio_mean", "ratio_max", "clip_low_fraction", "approx_kl", "importance_max"} & metrics.keys()


def test_minibatches_are_no_more_than_the_groups_with_a_gradient(make_policy: MakePolicy, group: list[Sample]) -> None:
    rows = [replace(row, group_id=row.episode_id // 3) for row in group]  # 1 and 2, 3 and 4
    policy = make_policy(minibatches=3)
    assert policy.train_step(rows, ADVANTAGES, version=0)["num_updates"] == 2
    assert policy.train_step(rows, ADVANTAGES | {3: 0.0, 4: 0.0}, version=1)["num_updates"] == 1


def test_same_seed_and_version_give_the_same_step_in_any_order(make_policy: MakePolicy, group: list[Sample]) -> None:
    first, second, other = make_policy(), make_policy(), make_policy(seed=2)
    first.train_step(group, ADVANTAGES, version=3)
    second.train_step(list(reversed(group)), ADVANTAGES, version=3)
    other.train_step(group, ADVANTAGES, version=3)
    assert torch.equal(weights_of(first), weights_of(second))
    assert not torch.equal(weights_of(first), weights_of(other))


def test_gap_is_rounding_where_the_engine_had_the_same_weights(make_policy: MakePolicy, group: list[Sample]) -> None:
    metrics = make_policy().train_step(group, ADVANTAGES, version=0)
    assert metrics["logprob_gap_tokens"] == sum(row.num_tokens for row in group)
    assert metrics["logprob_gap_max"] < 1e-5
    assert 0 < metrics["entropy"] < np.log(576)


def test_gap_shows_one_wrong_token(make_policy: MakePolicy, group: list[Sample]) -> None:
    wrong = group[0].ids_L.copy()
    wrong[np.flatnonzero(group[0].mask_L)[2]] ^= 1
    metrics = make_policy().train_step([replace(group[0], ids_L=wrong), *group[1:]], ADVANTAGES, version=0)
    assert metrics["logprob_gap_max"] > 0.01


@pytest.mark.parametrize("version", [0, 1])
def test_policy_that_says_no_number_is_refused_although_no_row_has_an_advantage(
    make_policy: MakePolicy, group: list[Sample], version: int
) -> None:
    policy = make_policy()
    with torch.no_grad():
        next(policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"the policy's log-prob is not finite in episodes \[1, 2, 3, 4\]"):
        policy.train_step(group, dict.fromkeys(ADVANTAGES, 0.0), version=version)


def test_tokens_of_other_versions_are_not_compared(make_policy: MakePolicy, group: list[Sample]) -> None:
    metrics = make_policy().train_step(group, ADVANTAGES, version=1)
    assert metrics["logprob_gap_tokens"] == 0.0
    assert "logprob_gap_max" not in metrics


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (float("nan"), r"step 4 -> 5: the loss is not finite in episodes \[2\]"),
        (1e30, r"step 4 -> 5: the gradient is inf over episodes \[1, 2\]"),
    ],
)
def test_numbers_that_are_not_finite_stop_the_step_before_the_weights_change(
    make_policy: MakePolicy, group: list[Sample], advantage: float, message: str
) -> None:
    policy = make_policy()
    before = weights_of(policy)
    with pytest.raises(TrainingError, match=message):
        policy.train_step(group[:2], {1: 1.0, 2: advantage}, version=4)
    assert torch.equal(weights_of(policy), before)


@pytest.mark.parametrize("bad", [1, 2, 3, 4])
@pytest.mark.parametrize("what", ["advantage", "anchor"])
def test_rows_that_are_not_finite_stop_the_step_before_the_weights_change_in_whichever_minibatch_they_are(
    make_policy: MakePolicy, group: list[Sample], bad: int, what: str
) -> None:
    policy = make_policy(minibatches=2, anchor="proximal" if what == "anchor" else "behaviour")
    advantages = dict(ADVANTAGES)
    if what == "advantage":
        advantages[bad] = float("nan")
    else:
        # A token of this row alone that the policy can no longer sample.
        sampled = [set(row.ids_L[row.mask_L].tolist()) for row in group]
        (token, *_) = sampled[bad - 1].difference(*sampled[: bad - 1], *sampled[bad:])
        head = policy.model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
        with torch.no_grad():
            head.bias[token] = -torch.inf
    before = weights_of(policy)
    with pytest.raises(TrainingError, match=rf"step 4 -> 5: the loss is not finite in episodes \[{bad}\]"):
        policy.train_step(group, advantages, version=4)
    assert torch.equal(weights_of(policy), before)


@pytest.mark.parametrize("max_positions", [1, 4096])
def test_rewards_are_whitened_over_the_whole_step_whatever_its_passes(
    make_policy: MakePolicy, group: list[Sample], max_positions: int
) -> None:
    policy = make_policy(advantage="reinforce_plus_plus", minibatches=1, max_positions=max_positions)
    assert len(policy.microbatches(group)) == (4 if max_positions == 1 else 1)
    groups = [
        GroupRewards(group_id=0, raw={1: 1.0, 2: 0.0}, shaped={1: 1.0, 2: 0.0}),
        GroupRewards(group_id=1, raw={3: 0.0, 4: 0.0}, shaped={3: 0.0, 4: 0.0}),
    ]
    advantages = step_advantages(groups, train=policy.train).by_episode
    metrics = policy.train_step(group, advantages, version=0)
    # Rewards 1 0 0 0: mean 1/4, population std sqrt(3)/4; alone, the second group would have none.
    std = np.sqrt(3) / 4 + 1e-4
    counts = [row.num_tokens for row in group]
    expected = -(0.75 * counts[0] - 0.25 * sum(counts[1:])) / std / sum(counts)
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_step_without_rows_changes_nothing_and_has_finite_metrics(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy = make_policy(kl="reward", kl_coefficient=0.1)
    before = weights_of(policy)
    silent = [replace_by_nothing(row) for row in group]
    assert policy.reference_kl(silent) == {}
    metrics = policy.train_step(silent, ADVANTAGES, version=0)
    assert torch.equal(weights_of(policy), before)
    assert metrics.keys() == {"loss", "grad_norm", "learning_rate", "num_updates", "logprob_gap_tokens"}
    assert (metrics["loss"], metrics["logprob_gap_tokens"]) == (0.0, 0.0)
    json.dumps(metrics, allow_nan=False)


def test_infinite_logprob_that_a_clip_would_hide_stops_the_step(
    make_policy: MakePolicy, make_random_sample: MakeSample, group: list[Sample]
) -> None:
    # A token that the policy can no longer sample: its ratio is 0, and the clip makes a finite loss of it.
    policy = make_policy(minibatches=1)
    sampled = group[1].ids_L[group[1].mask_L][0]
    head = policy.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    with torch.no_grad():
        head.bias[sampled] = -torch.inf
    others = [row for row in group if sampled not in row.ids_L[row.mask_L]]
    with pytest.raises(TrainingError, match=r"step 1 -> 2: the loss is not finite in episodes \[2\]"):
        policy.train_step([*others, group[1]], ADVANTAGES, version=1)


def test_token_that_the_same_weights_sampled_and_call_impossible_stops_the_step(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy = make_policy()
    head = policy.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    with torch.no_grad():
        head.bias[group[1].ids_L[group[1].mask_L][0]] = -torch.inf
    with pytest.raises(TrainingError, match=r"step 0 -> 1: the policy's log-prob is not finite in episodes \[.*2.*\]"):
        policy.train_step(group, dict.fromkeys(ADVANTAGES, 0.0), version=0)


OBJECTIVES: list[dict[str, object]] = [
    {"loss": "gspo", "average": "episode", "clip_low": 3e-4, "clip_high": 4e-4},
    {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    {"average": "constant", "divisor_tokens": 16},
    {"anchor": "proximal", "correction": "mask", "correction_level": "sequence"},
]


@pytest.mark.parametrize("train", OBJECTIVES, ids=str)
def test_step_of_any_objective_raises_good_episodes_and_lowers_bad_ones(
    make_policy: MakePolicy, group: list[Sample], train: dict[str, object]
) -> None:
    policy = make_policy(**train)
    before = {row.episode_id: logprobs_of(policy, row).sum() for row in group}
    policy.train_step(group, ADVANTAGES, version=5)
    for row in group:
        assert np.sign(logprobs_of(policy, row).sum() - before[row.episode_id]) == ADVANTAGES[row.episode_id]


def test_distance_to_the_start_weights_is_summed_over_the_tokens_of_an_episode(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy = make_policy(kl="reward", kl_coefficient=0.1, kl_estimator="k1")
    moved = replace(group[1], behaviour_logprobs_L=group[1].behaviour_logprobs_L + 0.25 * group[1].mask_L)
    assert policy.reference_kl([group[0], moved, replace_by_nothing(group[2])]) == pytest.approx(
        {1: 0.0, 2: 0.25 * group[1].num_tokens}, abs=1e-5
    )


def test_kl_in_the_loss_is_to_the_start_weights_and_acts_on_rows_without_advantage(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    policy = make_policy(kl="loss", kl_coefficient=10.0, minibatches=1, kl_estimator="k2")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    nothing = dict.fromkeys(ADVANTAGES, 0.0)
    distances = [policy.train_step(group, nothing, version=9)["reference_kl"] for _ in range(8)]
    assert distances[0] > 0.01
    assert distances[-1] < distances[0] / 2


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_entropy_bonus_raises_the_entropy_of_rows_without_advantage(
    make_policy: MakePolicy, group: list[Sample], top_p: float
) -> None:
    policy = make_policy(entropy_coefficient=1.0, minibatches=1, top_p=top_p)
    nothing = dict.fromkeys(ADVANTAGES, 0.0)
    entropies = [policy.train_step(group, nothing, version=9)["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 1e-3


def test_loss_is_the_mean_over_the_tokens_of_policy_kl_and_entropy(
    make_policy: MakePolicy, group: list[Sample]
) -> None:
    # At the start weights the ratio is 1 and the distance 0: what is left are advantages and entropy.
    policy = make_policy(minibatches=1, entropy_coefficient=0.01, kl="loss", kl_coefficient=0.3)
    metrics = policy.train_step(group, ADVANTAGES, version=0)
    counts = {row.episode_id: row.num_tokens for row in group}
    mean_advantage = sum(ADVANTAGES[number] * count for number, count in counts.items()) / sum(counts.values())
    assert metrics["loss"] == pytest.approx(-mean_advantage - 0.01 * metrics["entropy"], abs=1e-5)


def test_minibatches_keep_siblings_together_and_are_never_empty(make_random_sample: MakeSample) -> None:
    rows = [make_random_sample(number, group_id=number % 3) for number in range(9)]
    parts = split_by_group(rows, parts=4, randomness=random.Random(0))
    assert [len(part) for part in parts] == [3, 3, 3]
    assert all(len({row.group_id for row in part}) == 1 for part in parts)
    assert sorted(row.episode_id for part in parts for row in part) == list(range(9))


@pytest.mark.parametrize(
    ("files", "message"), [({}, "has no config.json"), ({"config.json": "{}"}, "cannot be loaded")]
)
def test_folder_without_a_model_is_refused_by_name(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SetupError, match=f"model folder {tmp_path} {message}"):
        Policy.load(RunConfig(name="test", model=tmp_path))


def test_top_p_keeps_the_nucleus_and_what_was_sampled(make_policy: MakePolicy, make_random_sample: MakeSample) -> None:
    policy, sample = make_policy(temperature=0.7, top_p=0.9), make_random_sample(1)
    ids, expected = sample.ids_L.tolist(), []
    for position in np.flatnonzero(sample.mask_L):
        with torch.no_grad():
            probs_V = (policy.model(torch.tensor([ids[:position]])).logits[0, -1] / 0.7).softmax(-1)
        kept, mass = {ids[position]}, 0.0
        for token in probs_V.argsort(descending=True).tolist():
            if mass < 0.9:
                kept.add(token)
            mass += probs_V[token].item()
        expected.append((probs_V[ids[position]] / probs_V[sorted(kept)].sum()).log().item())
    np.testing.assert_allclose(logprobs_of(policy, sample), expected, atol=1e-4)
