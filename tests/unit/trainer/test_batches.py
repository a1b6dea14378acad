"""Rows in the shapes of TRL and verl, by hand: two turns with a tool between them, rows of several lengths."""

from __future__ import annotations

import numpy as np
import pytest

from common.episode import ScoredEpisode, TurnTokens
from trainer.batches import Row, trl_batch, verl_batch
from trainer.samples import make_samples


def turn(suffix: list[int], sampled: list[int], logprobs: list[float]) -> TurnTokens:
    return TurnTokens(
        suffix_ids=np.array(suffix, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.zeros(len(sampled), np.int32),
    )


def row(episode_id: int, turns: tuple[TurnTokens, ...], *, reward: float, advantage: float) -> Row:
    episode = ScoredEpisode(episode_id=episode_id, group_id=7, outcome="finished", reward=reward, turns=turns)
    (sample,) = make_samples(episode)
    return Row(sample=sample, reward=reward, advantage=advantage)


# The pad id, 0, is also a real token.
LONG = row(1, (turn([1, 2], [3, 0], [-0.5, -0.25]), turn([9, 9, 9], [4], [-1.0])), reward=1.0, advantage=0.5)
SHORT = row(2, (turn([1, 2, 8], [5], [-2.0]),), reward=-1.0, advantage=-0.5)


def test_trl_has_lists_of_prompts_and_completions_with_the_tools_words_masked() -> None:
    batch = trl_batch([LONG, SHORT])
    assert batch.prompt_ids == [[1, 2], [1, 2, 8]]
    assert batch.completion_ids == [[3, 0, 9, 9, 9, 4], [5]]
    assert batch.tool_mask == [[1, 1, 0, 0, 0, 1], [1]]
    assert batch.logprobs == [[-0.5, -0.25, 0, 0, 0, -1.0], [-2.0]]
    assert (batch.rewards, batch.advantages) == ([1.0, -1.0], [0.5, -0.5])
    assert (batch.group_ids, batch.episode_ids) == ([7, 7], [1, 2])


def test_verl_has_prompts_padded_left_and_responses_padded_right() -> None:
    batch = verl_batch([LONG, SHORT], pad_id=0)
    assert batch.prompts.tolist() == [[0, 1, 2], [1, 2, 8]]
    assert batch.responses.tolist() == [[3, 0, 9, 9, 9, 4], [5, 0, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 3, 3, 3, 3, 3]]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [[-0.5, -0.25, 0, 0, 0, -1.0], [-2.0, 0, 0, 0, 0, 0]]
    assert batch.token_level_scores.tolist() == [[0, 0, 0, 0, 0, 1.0], [-1.0, 0, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0, 0, 0, 0.5], [-0.5, 0, 0, 0, 0, 0]]
    assert batch.uid.tolist() == ["7", "7"]
    assert batch.tensors()["input_ids"].shape == (2, 9)
    assert batch.non_tensors()["episode_id"].tolist() == [1, 2]


def test_nothing_is_no_batch() -> None:
    with pytest.raises(ValueError, match="no rows"):
        verl_batch([], pad_id=0)
