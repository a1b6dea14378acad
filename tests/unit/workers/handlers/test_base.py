from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from common.episode import MAX_REWARD, Message
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.handlers.base import Prepared, Score, compacted_messages, returned


@pytest.mark.parametrize("number", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), Decimal(1)])
def test_whatever_can_be_a_float_is_a_reward(number: Any) -> None:
    score = Score(reward=number, parts={"one": number})
    assert (score.reward, score.parts) == (1.0, {"one": 1.0})
    assert type(score.reward) is type(score.parts["one"]) is float


@pytest.mark.parametrize("number", [MAX_REWARD, -MAX_REWARD])
def test_largest_rewards_are_taken(number: float) -> None:
    assert Score(reward=number).reward == number


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1e300, "1e+300"),
        (-1e300, "-1e+300"),
        (1_000_000.1, "1000000.1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "None"),
        ("1", "'1'"),
        (np.zeros(2), "array"),
        (1j, "1j"),
    ],
)
def test_what_is_no_bounded_number_is_refused_by_field_and_value(number: Any, shown: str) -> None:
    for made, field in (({"reward": number}, "reward"), ({"reward": 0.0, "parts": {"a": number}}, "parts['a']")):
        with pytest.raises(ValueError, match=r"^Score: ") as refused:
            Score(**made)
        words = f"Score: {field} must be a finite number from -1,000,000 to 1,000,000, got {shown}"
        assert str(refused.value).startswith(words)


def test_integer_too_large_for_a_float_is_refused_in_few_words() -> None:
    with pytest.raises(ValueError, match="reward must be a finite number") as refused:
        Score(reward=10**400)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (None, "parts must map names to numbers, got None"),
        ([1.0], r"parts must map names to numbers, got \[1.0\]"),
        ({1: 1.0}, "a name in parts must be plain text, got 1"),
        ({"a\0b": 1.0}, r"a name in parts must be plain text, got 'a\\x00b'"),
        ({"\ud800": 1.0}, "a name in parts must be plain text, got"),
    ],
)
def test_parts_that_cannot_be_stored_are_refused(parts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^Score: {words}"):
        Score(reward=1.0, parts=parts)


def test_an_agent_that_tampered_gets_no_reward() -> None:
    assert Score(reward=0, tampered=True).reward == 0.0
    with pytest.raises(ValueError, match=r"no reward above 0, got 0\.5"):
        Score(reward=0.5, tampered=True)


def test_handlers_result_of_another_kind_is_the_handlers_error() -> None:
    score = Score(reward=1.0)
    assert returned(score, Score, "eval of handler x") is score
    with pytest.raises(EpisodeError, match=r"^handler_failed: init of handler x must return Prepared, got NoneType$"):
        returned(None, Prepared, "init of handler x")


ASKED, ANSWERED = Message(role="user", content="go"), Message(role="assistant", content="gone")


@pytest.mark.parametrize("value", [[ASKED], (ASKED, ANSWERED, ASKED), [Message(role="tool", content="")]])
def test_messages_that_the_policy_can_answer_are_a_compacted_conversation(value: Any) -> None:
    assert compacted_messages(value, "mine") == tuple(value)


def test_a_handler_may_leave_a_conversation() -> None:
    assert compacted_messages(None, "mine") is None


@pytest.mark.parametrize(
    ("value", "what", "is_final"),
    [
        ([], "it ends with nothing", False),
        ([ASKED, ANSWERED], "it ends with one of role assistant", False),
        ("go", "must return messages or None, got 'go'", True),
        ([{"role": "user", "content": "go"}], "must return messages or None, got ", True),
        (7, "must return messages or None, got 7", True),
    ],
)
def test_what_no_policy_could_answer_is_the_handler_s_failure(value: Any, what: str, is_final: bool) -> None:
    with pytest.raises(EpisodeError, match=f"compact of mine .*{what}") as caught:
        compacted_messages(value, "mine")
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, is_final)
