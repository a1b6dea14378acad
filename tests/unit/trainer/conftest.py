"""A random tiny model and hand-made episodes for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.config import RunConfig
from common.episode import ScoredEpisode, TurnTokens
from trainer.policy import Policy
from trainer.samples import Sample, make_samples, pad
from trainer.tiny import VOCAB_SIZE, make_model, save_model

MakeSample = Callable[..., Sample]
MakePolicy = Callable[..., Policy]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def start_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Start weights in float16 with some tokenizer files, as a run's configuration names them."""
    folder = tmp_path_factory.mktemp("start")
    save_model(make_model(eos_id=2, pad_id=0, seed=0), folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def make_policy(start_folder: Path) -> MakePolicy:
    """A policy from the start folder; keyword arguments are fields of the run's train section."""

    def make(*, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, **train: object) -> Policy:
        document = {"name": "test", "model": start_folder, "seed": seed, "train": train}
        return Policy.load(
            RunConfig.model_validate(document | {"rollout": {"temperature": temperature, "top_p": top_p}})
        )

    return make


@pytest.fixture
def model(make_policy: MakePolicy) -> PreTrainedModel:
    return make_policy().model


@pytest.fixture
def make_random_sample() -> MakeSample:
    """A row of two turns with random tokens, whose behaviour log-probs are those of `policy` where one is given."""

    def make(
        episode_id: int, *, group_id: int = 1, length: int = 24, version: int = 0, policy: Policy | None = None
    ) -> Sample:
        rng = np.random.default_rng(episode_id)
        suffix, sampled = length // 4, length // 2 - length // 4
        turns = tuple(
            TurnTokens(
                suffix_ids=rng.integers(0, VOCAB_SIZE, suffix, dtype=np.int32),
                sampled_ids=rng.integers(0, VOCAB_SIZE, sampled, dtype=np.int32),
                logprobs=rng.uniform(-7, -5, sampled).astype(np.float32),
                versions=np.full(sampled, version, np.int32),
            )
            for _ in range(2)
        )
        (sample,) = make_samples(
            ScoredEpisode(episode_id=episode_id, group_id=group_id, outcome="finished", reward=1.0, turns=turns)
        )
        return sample if policy is None else with_logprobs(sample, policy)

    return make


@pytest.fixture
def group(make_policy: MakePolicy, make_random_sample: MakeSample) -> list[Sample]:
    """Two groups of two rows of different length, sampled by the start weights."""
    policy = make_policy()
    return [
        make_random_sample(number, group_id=number // 3, length=16 + 4 * number, policy=policy)
        for number in (1, 2, 3, 4)
    ]


def with_logprobs(sample: Sample, policy: Policy) -> Sample:
    """The row as `policy` would have sampled it."""
    with torch.no_grad():
        logprobs_L = policy.logprobs(pad([sample]))[0].numpy()
    return replace(sample, behaviour_logprobs_L=logprobs_L)
