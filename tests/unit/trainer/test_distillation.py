"""What a teacher adds to the loss: values by hand, the gradient of the divergence, a policy that comes near it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import TINY_MODELS, RunConfig
from common.config_train import TrainConfig
from common.episode import ScoredEpisode, TurnTokens
from common.errors import RollmillError, SetupError
from trainer.losses import StepTotals, needs_all_rows, policy_loss
from trainer.policy import Policy
from trainer.samples import Sample, make_samples, pad
from trainer.teacher import LoadedTeacher, with_teacher_logprobs
from trainer.update import TrainingError

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]

CALCULATOR, SHELL = TINY_MODELS / "tiny-calculator", TINY_MODELS / "tiny-shell"


def train_config(**distill: object) -> TrainConfig:
    return TrainConfig.model_validate({"distill": {"teacher": "teacher"} | distill})


def token_loss(
    logprob: float,
    teacher: float,
    *,
    train: TrainConfig,
    advantage: float = 0.0,
    anchor: float | None = None,
    behaviour: float | None = None,
) -> tuple[float, float]:
    """(loss, gradient) of one token."""
    leaf = torch.tensor([[logprob]], requires_grad=True)
    anchor_BL = torch.tensor([[logprob if anchor is None else anchor]])
    loss_B, _ = policy_loss(
        leaf,
        behaviour_logprobs_BL=anchor_BL if behaviour is None else torch.tensor([[behaviour]]),
        anchor_logprobs_BL=anchor_BL,
        advantages_B=torch.tensor([advantage]),
        mask_BL=torch.ones(1, 1, dtype=torch.bool),
        totals=StepTotals(num_tokens=1, num_episodes=1),
        train=train,
        teacher_logprobs_BL=torch.tensor([[teacher]]),
    )
    loss_B.sum().backward()
    assert leaf.grad is not None
    return loss_B.item(), leaf.grad.item()


@pytest.mark.parametrize(
    ("teacher", "distill", "value"),
    [
        (-1.5, {}, -0.5),
        (-0.25, {}, 0.75),
        (-1.5, {"weight": 3.0}, -1.5),
        (-1.0, {}, 0.0),
        (-math.inf, {}, -20.0),
    ],
    ids=["worse", "better", "weighed", "same", "impossible"],
)
def test_token_has_the_gain_of_the_teacher_as_its_advantage(
    teacher: float, distill: dict[str, float], value: float
) -> None:
    loss, gradient = token_loss(-1.0, teacher, train=train_config(**distill))
    assert (loss, gradient) == pytest.approx((-value, -value))


def test_gain_adds_to_the_advantage_of_the_rewards_or_stands_alone() -> None:
    assert token_loss(-1.0, -1.5, advantage=2.0, train=train_config())[1] == pytest.approx(-1.5)
    assert token_loss(-1.0, -1.5, advantage=2.0, train=train_config(with_rewards=False))[1] == pytest.approx(0.5)


def test_gain_is_over_the_policy_and_is_weighed_and_clipped_as_the_rewards_are() -> None:
    train = TrainConfig.model_validate({"anchor": "proximal", "distill": {"teacher": "teacher"}})
    # gain -0.5 over the policy, weight e^0.4 of the anchor to the behaviour policy, ratio 1
    assert token_loss(-1.0, -1.5, behaviour=-1.4, train=train)[1] == pytest.approx(0.5 * math.exp(0.4))
    # gain -0.5 over the policy, whatever the anchor, and the ratio e^0.1 is within the clip
    assert token_loss(-1.0, -1.5, anchor=-1.1, train=train_config())[1] == pytest.approx(0.5 * math.exp(0.1))
    # gain 0.5 over the policy, but the ratio e^0.5 is above the clip
    assert token_loss(-1.0, -0.5, anchor=-1.5, train=train_config()) == pytest.approx((-0.64, 0.0))


UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e6, "dual_clip": 1e9, "distill": {"teacher": "t", "with_rewards": False}}


def by_logits_of_the_policy(
    policy_V: torch.Tensor, teacher_V: torch.Tensor, *, behaviour_V: torch.Tensor, train: TrainConfig
) -> list[float]:
    """Gradient of the mean loss of one token that the behaviour policy sampled; probabilities are given."""
    logits_V = policy_V.log().requires_grad_()
    anchor_V = behaviour_V if train.anchor == "behaviour" else (policy_V + behaviour_V) / 2
    loss_V, _ = policy_loss(
        logits_V.log_softmax(0)[:, None],
        behaviour_logprobs_BL=behaviour_V.log()[:, None],
        anchor_logprobs_BL=anchor_V.log()[:, None],
        advantages_B=torch.zeros_like(policy_V),
        mask_BL=torch.ones(len(policy_V), 1, dtype=torch.bool),
        totals=StepTotals(num_tokens=1, num_episodes=1),
        train=train,
        teacher_logprobs_BL=teacher_V.log()[:, None],
    )
    # Each token as often as the behaviour policy samples it.
    (found_V,) = torch.autograd.grad((behaviour_V * loss_V).sum(), logits_V)
    return list(found_V.tolist())


POLICY_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TEACHER_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
STALE_V = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
# By the logit of token v: p_v (d_v - KL), with d = log(p / teacher) = 0.91629, 0, -0.91629 and KL = 0.27489.
OF_THE_DIVERGENCE = [0.5 * (0.91629 - 0.27489), 0.3 * -0.27489, 0.2 * (-0.91629 - 0.27489)]


@pytest.mark.parametrize("behaviour_V", [POLICY_V, STALE_V], ids=["fresh", "stale"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"anchor": "proximal", "importance_cap": 1e6},
        {"loss": "cispo", "dual_clip": 3.0},
    ],
    ids=["behaviour", "proximal", "cispo"],
)
def test_mean_gradient_is_that_of_the_reverse_divergence_whoever_sampled(
    behaviour_V: torch.Tensor, fields: dict[str, object]
) -> None:
    train = TrainConfig.model_validate(UNCLIPPED | fields)
    found = by_logits_of_the_policy(POLICY_V, TEACHER_V, behaviour_V=behaviour_V, train=train)
    assert found == pytest.approx(OF_THE_DIVERGENCE, abs=1e-5)


@pytest.mark.parametrize("lag", [1, 4])
def test_policy_comes_to_its_teacher_on_tokens_of_old_versions(lag: int) -> None:
    logits = [torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64).log()] * (lag + 1)
    train = TrainConfig.model_validate(UNCLIPPED)
    for _ in range(400):
        policy_V, behaviour_V = (logits[index].softmax(0) for index in (-1, -1 - lag))
        gradient = by_logits_of_the_policy(policy_V, TEACHER_V, behaviour_V=behaviour_V, train=train)
        logits.append(logits[-1] - torch.tensor(gradient, dtype=torch.float64))
    policy_V = logits[-1].softmax(0)
    assert (policy_V * (policy_V / TEACHER_V).log()).sum().item() == pytest.approx(0, abs=1e-9)


def test_clip_leaves_out_a_token_that_has_left_its_range_towards_the_teacher_and_none_that_is_to_come_back() -> None:
    train = TrainConfig.model_validate(UNCLIPPED | {"clip_low": 0.2, "clip_high": 0.28})
    # Ratios 5/3, 3/4 and 2/3. The teacher wants the first down and the last up: both come back.
    found = by_logits_of_the_policy(POLICY_V, TEACHER_V, behaviour_V=STALE_V, train=train)
    assert found == pytest.approx(OF_THE_DIVERGENCE, abs=1e-5)
    # This one wants the first up and the last down still more.
    further_V = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    assert by_logits_of_the_policy(POLICY_V, further_V, behaviour_V=STALE_V, train=train) == [0.0, 0.0, 0.0]


def test_what_stands_outside_the_mask_is_never_seen_and_nan_under_it_shows(
    make_policy: MakePolicy, make_random_sample: MakeSample
) -> None:
    policy = make_policy(distill={"teacher": str(CALCULATOR)})
    (sample,), _ = with_teacher_logprobs([make_random_sample(1, policy=policy)], teacher_of(policy))
    assert sample.teacher_logprobs_L is not None
    hidden, shown = sample.teacher_logprobs_L.copy(), sample.teacher_logprobs_L.copy()
    hidden[~sample.mask_L] = np.nan
    shown[sample.mask_L.argmax()] = np.nan
    other = make_policy(distill={"teacher": str(CALCULATOR)})
    loss = policy.train_step([replaced(sample, hidden)], {1: 0.0}, version=0)["loss"]
    assert loss == other.train_step([sample], {1: 0.0}, version=0)["loss"] != 0
    with pytest.raises(TrainingError, match=r"episodes \[1\]"):
        policy.train_step([replaced(sample, shown)], {1: 0.0}, version=1)


def replaced(sample: Sample, values: np.ndarray) -> Sample:
    return Sample(**{**vars(sample), "teacher_logprobs_L": values})


def teacher_of(policy: Policy, folder: Path = CALCULATOR) -> LoadedTeacher:
    return LoadedTeacher(folder, start=SHELL, policy=policy)


def test_rows_without_advantage_of_rewards_are_computed() -> None:
    assert needs_all_rows(train_config())
    assert not needs_all_rows(TrainConfig())


def test_teacher_in_the_trainer_says_what_its_model_says_at_the_temperature_of_the_run(
    make_policy: MakePolicy, make_random_sample: MakeSample
) -> None:
    policy = make_policy(temperature=0.7, top_p=0.5, max_positions=30, distill={"teacher": str(CALCULATOR)})
    rows = [make_random_sample(number, length=16 + 4 * number, policy=policy) for number in range(3)]
    scored, metrics = with_teacher_logprobs(rows, teacher_of(policy))
    alone = Policy.load(RunConfig.model_validate({"name": "a", "model": CALCULATOR, "rollout": {"temperature": 0.7}}))
    gaps = []
    for row in scored:
        with torch.no_grad():
            expected_L = alone.logprobs(pad([row]))[0].numpy()
        assert row.teacher_logprobs_L == pytest.approx(expected_L, abs=1e-5)
        gaps += (row.behaviour_logprobs_L - expected_L)[row.mask_L].tolist()
    assert metrics == {"teacher_kl": pytest.approx(np.mean(gaps), abs=1e-5)}


def sampled(policy: Policy, *, num_rows: int, seed: int, num_tokens: int = 12) -> list[Sample]:
    """Rows that the policy's present weights sample after one given id."""
    generator = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(10, 500, (num_rows, 1), generator=generator)
    logprobs = []
    with torch.no_grad():
        for _ in range(num_tokens):
            log_BV = policy.model(input_ids=ids_BL).logits[:, -1].log_softmax(-1)
            next_B1 = torch.multinomial(log_BV.exp(), 1, generator=generator)
            logprobs.append(log_BV.gather(1, next_B1))
            ids_BL = torch.cat([ids_BL, next_B1], dim=1)
    logprobs_BT = torch.cat(logprobs, dim=1).numpy()
    rows = []
    for number, (ids_L, logprobs_T) in enumerate(zip(ids_BL.int().numpy(), logprobs_BT, strict=True)):
        versions = np.zeros(num_tokens, np.int32)
        turn = TurnTokens(suffix_ids=ids_L[:1], sampled_ids=ids_L[1:], logprobs=logprobs_T, versions=versions)
        episode = ScoredEpisode(episode_id=number, group_id=number // 4, outcome="finished", reward=0.0, turns=(turn,))
        rows += make_samples(episode)
    return rows


def test_policy_comes_near_its_teacher_on_what_it_samples_itself(make_policy: MakePolicy) -> None:
    policy = make_policy(
        distill={"teacher": str(CALCULATOR), "with_rewards": False}, learning_rate=5e-3, warmup_steps=0, grad_clip=1.0
    )
    found = []
    for version in range(16):
        rows, metrics = with_teacher_logprobs(sampled(policy, num_rows=24, seed=version), teacher_of(policy))
        found.append(metrics["teacher_kl"])
        # The rewards say the opposite to no avail.
        policy.train_step(rows, dict.fromkeys(range(24), -1.0), version=version)
    assert np.mean(found[-3:]) < 0.75 * found[0], found


def test_teacher_of_another_tokenizer_is_refused_by_the_first_id(tmp_path: Path, make_policy: MakePolicy) -> None:
    policy = make_policy()
    teacher_of(policy).check()
    text = (CALCULATOR / "tokenizer.json").read_text()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(CALCULATOR / name)
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|end_turn|>"))
    with pytest.raises(SetupError, match=r"another tokenizer.* id 2 is '<\|end_turn\|>' in only one"):
        teacher_of(policy, tmp_path).check()


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5])
def test_number_that_is_no_logprob_stops_the_step_with_the_row_named(
    make_random_sample: MakeSample, value: float
) -> None:
    sample = make_random_sample(4)
    first = int(sample.mask_L.argmax())

    class Odd:
        def check(self) -> None: ...

        def logprobs(self, samples: Sequence[Sample]) -> dict[tuple[int, int], np.ndarray]:
            return {row.key: np.where(np.arange(len(row.ids_L)) == first, value, -1.0) for row in samples}

    with pytest.raises(RollmillError, match=rf"episode 4 row 0: the teacher's log-prob of id \d+ at position {first}"):
        with_teacher_logprobs([sample], Odd())


def test_combinations_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match='zero_variance = "refill" drops groups'):
        TrainConfig.model_validate({"zero_variance": "refill", "distill": {"teacher": "t", "with_rewards": False}})
    with pytest.raises(
        ValueError, match=r"http://t:1 says the log-probs of temperature 1, and rollout.temperature = 0.7"
    ):
        RunConfig.model_validate(
            {
                "name": "a",
                "model": "m",
                "rollout": {"temperature": 0.7},
                "train": {"distill": {"teacher": "http://t:1"}},
            }
        )
    with pytest.raises(ValueError, match="a teacher is a folder or http://HOST:PORT"):
        train_config(teacher="ftp://t")
