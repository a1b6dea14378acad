from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from common.episode import (
    FINAL_STATES,
    MOVES,
    TAKES,
    EpisodeState,
    FinishReason,
    Message,
    Sampled,
    TurnTokens,
    VersionSpan,
    episode_digest,
)
from common.outcomes import AGENT_OUTCOMES, Outcome


def sampled(ids: tuple[int, ...], logprobs: tuple[float, ...], *spans: tuple[int, int, int]) -> Sampled:
    return Sampled(
        ids=ids,
        logprobs=logprobs,
        spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
        finish_reason=FinishReason.STOP,
    )


def test_ids_without_log_probs_are_refused_with_both_counts():
    with pytest.raises(ValueError, match="2 sampled ids but 1 log-probs"):
        sampled((1, 2), (-0.5,), (0, 0, 2))


@pytest.mark.parametrize("spans", [[(0, 0, 1)], [(0, 1, 2)], [(0, 0, 1), (1, 0, 2)], [(0, 0, 3)], []])
def test_version_spans_must_cover_every_token_once(spans: list[tuple[int, int, int]]):
    with pytest.raises(ValueError, match="span"):
        sampled((1, 2), (-0.5, -0.5), *spans)


def test_a_turn_may_span_two_versions():
    assert [span.version for span in sampled((1, 2), (-0.5, -0.5), (3, 0, 1), (4, 1, 2)).spans] == [3, 4]


def test_the_digest_is_that_of_the_stored_bytes():
    turn = sampled((1, 2), (-0.5, -0.25), (0, 0, 2))
    stored = struct.pack("<2i", 1, 2) + struct.pack("<2f", -0.5, -0.25)
    assert turn.digest == hashlib.sha256(stored).digest()
    assert episode_digest([turn.digest]) == hashlib.sha256(turn.digest).digest()


def test_trainer_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 ids, 2 log-probs, 1 versions"):
        TurnTokens(
            suffix_ids=np.zeros(1, np.int32),
            sampled_ids=np.zeros(2, np.int32),
            logprobs=np.zeros(2, np.float32),
            versions=np.zeros(1, np.int32),
        )


def test_every_stage_takes_a_state_that_can_move_on_and_final_states_cannot():
    assert {EpisodeState.SCORED, EpisodeState.FAILED, EpisodeState.CANCELLED} == FINAL_STATES
    for state in TAKES.values():
        assert EpisodeState.FAILED in MOVES[state]
        assert EpisodeState.CANCELLED in MOVES[state]


def test_no_infrastructure_outcome_counts_as_the_agents():
    infrastructure = {
        Outcome.SANDBOX_FAILED,
        Outcome.SANDBOX_EXPIRED,
        Outcome.ENGINE_LOST,
        Outcome.CAPTURE_INCOMPLETE,
        Outcome.HANDLER_FAILED,
        Outcome.LEASE_LOST,
        Outcome.NODE_LOST,
        Outcome.STAGE_TIMEOUT,
    }
    assert set(Outcome) - infrastructure == AGENT_OUTCOMES


def test_a_message_holds_only_what_can_be_stored():
    assert Message(role="tool", content="a\0b\ud800c\U0001f600").content == "a\ufffdb\ufffdc\U0001f600"
