"""Rows carry every sampled token once, under mask 1, with the values that the engine client received."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.episode import (
    FinishReason,
    Sampled,
    ScoredEpisode,
    TurnTokens,
    VersionSpan,
    episode_digest,
    ids_to_bytes,
    logprobs_to_bytes,
    sampled_digest,
)
from trainer.samples import (
    NO_VERSION,
    Sample,
    fresh_mask,
    make_samples,
    microbatches,
    pad,
    rows_by_episode,
    samples_digest,
)


def tokens(suffix: list[int], sampled: list[int], logprobs: list[float], versions: list[int]) -> TurnTokens:
    return TurnTokens(
        suffix_ids=np.array(suffix, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
    )


def episode(*turns: TurnTokens) -> ScoredEpisode:
    return ScoredEpisode(episode_id=7, group_id=3, outcome="finished", reward=1.0, turns=turns)


def make_sample(episode: ScoredEpisode) -> Sample:
    """The one row of an episode whose history was never rewritten."""
    (sample,) = make_samples(episode)
    return sample


TWO_TURNS = episode(
    tokens([10, 11, 12], [20, 2], [-0.5, -0.25], [4, 4]), tokens([13], [21, 22, 2], [-1.5, -2.0, -0.125], [4, 5, 5])
)


def test_turns_are_joined_in_order_with_masks_logprobs_and_versions() -> None:
    sample = make_sample(TWO_TURNS)
    assert sample.ids_L.tolist() == [10, 11, 12, 20, 2, 13, 21, 22, 2]
    assert sample.mask_L.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert sample.behaviour_logprobs_L.tolist() == [0, 0, 0, -0.5, -0.25, 0, -1.5, -2.0, -0.125]
    assert sample.versions_L.tolist() == [NO_VERSION] * 3 + [4, 4] + [NO_VERSION] + [4, 5, 5]
    assert (sample.episode_id, sample.group_id, sample.num_tokens) == (7, 3, 5)
    assert [array.dtype for array in (sample.ids_L, sample.behaviour_logprobs_L)] == [np.int32, np.float32]


def test_digest_of_the_row_is_that_of_what_the_client_received() -> None:
    received = [
        Sampled(
            ids=(20, 2),
            logprobs=(-0.1, -0.7),
            spans=(VersionSpan(version=4, start=0, end=2),),
            finish_reason=FinishReason.STOP,
        ),
        Sampled(
            ids=(21, 22, 2),
            logprobs=(-1.3, -2.1, -1e-7),
            spans=(VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=1, end=3)),
            finish_reason=FinishReason.STOP,
        ),
    ]
    turns = [tokens([10, 11], list(turn.ids), list(turn.logprobs), [4] * len(turn.ids)) for turn in received]
    assert samples_digest(make_samples(episode(*turns))) == episode_digest([turn.digest for turn in received])


@pytest.mark.parametrize("name", ["ids_L", "behaviour_logprobs_L"])
def test_digest_changes_with_one_sampled_value(name: str) -> None:
    sample = make_sample(TWO_TURNS)
    changed = getattr(sample, name).copy()
    changed[4] -= 1
    assert samples_digest([replace(sample, **{name: changed})]) != samples_digest([sample])


def test_digest_changes_when_the_mask_shifts_by_one() -> None:
    sample = make_sample(TWO_TURNS)
    assert samples_digest([replace(sample, mask_L=np.roll(sample.mask_L, -1))]) != samples_digest([sample])


def test_episode_without_turns_is_an_empty_row() -> None:
    sample = make_sample(episode())
    assert (len(sample.ids_L), sample.num_tokens) == (0, 0)
    assert samples_digest([sample]) == episode_digest([])


@pytest.mark.parametrize("turn", [tokens([], [1], [-1.0], [0]), tokens([1], [], [], [])])
def test_turn_that_the_mask_could_not_show_is_refused(turn: TurnTokens) -> None:
    with pytest.raises(ValueError, match=r"episode 7 turn 1: \d suffix ids and \d sampled ids"):
        make_sample(episode(tokens([1], [2], [-1.0], [0]), turn))


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf"), 0.7])
def test_number_that_is_no_logprob_is_refused_where_it_stands(logprob: float) -> None:
    expected = rf"^episode 7 row 0: the behaviour log-prob of id 3 at position 2 is {logprob:g}, it must be finite"
    with pytest.raises(ValueError, match=expected):
        make_sample(episode(tokens([1], [2, 3], [-1.0, logprob], [0, 0])))


def test_logprob_above_0_by_rounding_is_taken() -> None:
    assert make_sample(episode(tokens([1], [2], [1e-6], [0]))).behaviour_logprobs_L[1] > 0


def test_arrays_of_different_length_are_refused() -> None:
    sample = make_sample(TWO_TURNS)
    with pytest.raises(ValueError, match="episode 7: 9 ids, 8 mask positions, 9 log-probs, 9 versions"):
        replace(sample, mask_L=sample.mask_L[:-1])


def test_turn_that_changed_versions_half_way_is_not_fresh() -> None:
    sample = make_sample(TWO_TURNS)
    assert np.flatnonzero(fresh_mask(sample, 4)).tolist() == [3, 4]
    assert not fresh_mask(sample, 5).any()


def test_padding_is_masked_by_length_though_its_id_is_also_sampled() -> None:
    long, short = make_sample(TWO_TURNS), make_sample(episode(tokens([0, 1], [0, 0], [-0.5, -0.25], [4, 4])))
    batch = pad([long, short])
    assert batch.ids_BL.tolist() == [long.ids_L.tolist(), [0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.mask_BL[1].tolist() == [False, False, True, True] + [False] * 5
    assert batch.behaviour_logprobs_BL[1].tolist() == [0, 0, -0.5, -0.25] + [0] * 5


def test_logprobs_outside_the_mask_do_not_reach_the_batch() -> None:
    sample = make_sample(TWO_TURNS)
    dirty = np.where(sample.mask_L, sample.behaviour_logprobs_L, np.nan).astype(np.float32)
    batch = pad([replace(sample, behaviour_logprobs_L=dirty)])
    assert batch.behaviour_logprobs_BL[0].tolist() == sample.behaviour_logprobs_L.tolist()


def test_microbatches_hold_each_row_once_within_the_budget() -> None:
    rows = [sample_of_length(length) for length in (5, 2, 9, 3, 2, 20)]
    batches = microbatches(rows, max_positions=10)
    assert [[len(row.ids_L) for row in batch] for batch in batches] == [[2, 2, 3], [5], [9], [20]]


def sample_of_length(length: int) -> Sample:
    return make_sample(episode(tokens([1] * (length - 1), [2], [-1.0], [0])))


REWRITTEN = episode(
    tokens([10, 11], [20, 2], [-0.5, -0.25], [4, 4]),
    replace(tokens([10, 30, 31], [21, 2], [-1.5, -2.0], [4, 5]), sample=1),
    replace(tokens([13], [22], [-0.75], [5]), sample=1),
    replace(tokens([10, 20, 2, 7], [23, 2], [-0.1, -0.2], [6, 6]), sample=2),
)


def test_a_rewritten_history_gives_a_row_more_and_each_sampled_token_is_trained_in_one() -> None:
    rows = make_samples(REWRITTEN)

    assert [(row.episode_id, row.group_id, row.index) for row in rows] == [(7, 3, 0), (7, 3, 1), (7, 3, 2)]
    assert [row.ids_L.tolist() for row in rows] == [
        [10, 11, 20, 2],
        [10, 30, 31, 21, 2, 13, 22],
        [10, 20, 2, 7, 23, 2],
    ]
    trained = [row.ids_L[row.mask_L].tolist() for row in rows]
    assert trained == [[20, 2], [21, 2, 22], [23, 2]]
    assert [token for row in trained for token in row] == [
        token for turn in REWRITTEN.turns for token in turn.sampled_ids.tolist()
    ]


def test_sampled_tokens_that_a_later_row_shows_again_are_given_there() -> None:
    third = make_samples(REWRITTEN)[2]
    assert third.ids_L[1:3].tolist() == make_samples(REWRITTEN)[0].ids_L[2:4].tolist()
    assert third.mask_L.tolist() == [False] * 4 + [True] * 2
    assert third.versions_L.tolist() == [NO_VERSION] * 4 + [6, 6]


def test_the_digest_of_several_rows_is_that_of_the_turns_in_order() -> None:
    turn_digests = [
        sampled_digest(ids_to_bytes(turn.sampled_ids), logprobs_to_bytes(turn.logprobs)) for turn in REWRITTEN.turns
    ]
    rows = make_samples(REWRITTEN)
    assert samples_digest(rows) == episode_digest(turn_digests)
    assert samples_digest(rows[:2]) != samples_digest(rows)


def test_rows_come_back_by_episode() -> None:
    rows = [*make_samples(REWRITTEN), *make_samples(replace(TWO_TURNS, episode_id=8))]
    assert [(number, len(of_it)) for number, of_it in rows_by_episode(rows)] == [(7, 3), (8, 1)]


@pytest.mark.parametrize("samples", [(1, 1), (0, 2), (0, 1, 0)])
def test_samples_out_of_order_are_refused(samples: tuple[int, ...]) -> None:
    turns = [replace(tokens([1], [2], [-1.0], [0]), sample=sample) for sample in samples]
    with pytest.raises(ValueError, match="episode 7: turns of samples"):
        make_samples(episode(*turns))
