"""What cannot be trained is refused in one line, with the id and the field. Files of runs: test_config.py."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.db.steps import ScoredGroup
from common.episode import ScoredEpisode
from common.errors import SetupError
from tests.unit.trainer.conftest import MakePolicy, MakeSample
from trainer.check_input import check_groups, check_rows
from trainer.checkpoint import CheckpointStore, write_whole


def group(*rewards: object) -> ScoredGroup:
    episodes = tuple(
        ScoredEpisode(episode_id=10 + index, group_id=5, outcome="finished", reward=reward, turns=())  # type: ignore[arg-type]
        for index, reward in enumerate(rewards)
    )
    return ScoredGroup(group_id=5, episodes=episodes)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e300, -1000001, None, "1.0", True, [1.0]])
def test_reward_that_no_step_can_train_is_named_with_its_episode(reward: object) -> None:
    with pytest.raises(
        ValueError, match=r"^group 5 episode 11: reward must be a finite number from -1,000,000 to 1,000,000, "
    ) as refused:
        check_groups([group(1.0, reward)], max_size=2)
    assert str(refused.value).endswith(repr(reward))


@pytest.mark.parametrize("reward", [0, 1, -2.5, 1e6, np.float32(0.5)])
def test_numbers_are_rewards(reward: float) -> None:
    check_groups([group(reward, 0.0)], max_size=2)


def test_group_without_episodes_is_named() -> None:
    with pytest.raises(ValueError, match=r"^group 5: it has no scored episode$"):
        check_groups([group()], max_size=2)


def test_group_larger_than_asked_is_named_with_both_sizes() -> None:
    expected = r"^group 5: it has 3 scored episodes, but rollout.group_size \+ rollout.oversample = 2$"
    with pytest.raises(ValueError, match=expected):
        check_groups([group(0.0, 1.0, 0.0)], max_size=2)


def test_row_longer_than_the_model_is_named_with_both_lengths(make_random_sample: MakeSample) -> None:
    sample = make_random_sample(7, length=24)
    check_rows([sample], context=24, vocab_size=576)
    check_rows([sample], context=None, vocab_size=576)
    expected = r"^episode 7 row 0: its 24 ids are more than the 23 positions of the model \(max_position_embeddings\)"
    with pytest.raises(ValueError, match=expected):
        check_rows([sample], context=23, vocab_size=576)


@pytest.mark.parametrize("token_id", [-1, 576])
def test_id_that_the_model_does_not_have_is_named(make_random_sample: MakeSample, token_id: int) -> None:
    sample = make_random_sample(7)
    ids_L = sample.ids_L.copy()
    ids_L[-1] = token_id
    with pytest.raises(ValueError, match=f"^episode 7 row 0: id {token_id} is not in the model's vocabulary of 576"):
        check_rows([replace(sample, ids_L=ids_L)], context=512, vocab_size=576)


def test_checkpoint_of_another_model_is_refused_with_the_tensor(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy = make_policy()
    state = policy.state()
    name = "model.model.embed_tokens.weight"
    store = CheckpointStore(tmp_path, "run-a")
    store.save(1, partial(write_whole, state | {name: state[name][:, :8]}))
    with pytest.raises(
        SetupError, match=f"^the checkpoint belongs to another model: {name} is .*8.* there, .*64.* here"
    ):
        policy.restore(store.load(1))
