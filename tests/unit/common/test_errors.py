from __future__ import annotations

import pytest

from common.errors import EpisodeError, SetupError, boundary
from common.outcomes import Outcome


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(4)])
def test_whatever_a_handler_raises_is_its_own_failure(error: BaseException):
    with (
        pytest.raises(EpisodeError, match=rf"eval of x: {type(error).__name__}: ") as raised,
        boundary(Outcome.HANDLER_FAILED, "eval of x"),
    ):
        raise error
    assert raised.value.outcome is Outcome.HANDLER_FAILED


@pytest.mark.parametrize("error", [SetupError("mend it"), KeyboardInterrupt()])
def test_what_is_not_of_the_handler_passes(error: BaseException):
    with pytest.raises(type(error)), boundary(Outcome.HANDLER_FAILED, "eval of x"):
        raise error


def test_a_message_that_no_text_column_takes_is_kept_readable():
    error = EpisodeError(Outcome.HANDLER_FAILED, "boom \x00 and \ud800 " + "x" * 9000)
    assert error.detail.startswith(r"boom \x00 and \ud800 xxx")
    assert error.detail.endswith("characters)")
    assert len(error.detail) < 4100
