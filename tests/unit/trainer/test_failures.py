from __future__ import annotations

import threading

import pytest

from common.errors import DatabaseUnavailable, SetupError
from trainer.failures import outlast_outage


class Away:
    """A database that is away for the first calls."""

    def __init__(self, num_calls: int, *, stop: threading.Event | None = None) -> None:
        self.num_left = num_calls
        self._stop = stop

    def __call__(self) -> str:
        if self.num_left == 0:
            return "done"
        self.num_left -= 1
        if self._stop is not None:
            self._stop.set()
        raise DatabaseUnavailable("connection refused")


def test_action_is_done_once_the_database_is_back() -> None:
    assert outlast_outage(Away(2), stop=threading.Event(), limit_s=60) == "done"


def test_stop_ends_the_wait() -> None:
    stop = threading.Event()
    away = Away(2, stop=stop)
    assert outlast_outage(away, stop=stop, limit_s=60) is None
    assert away.num_left == 1


def test_database_that_stays_away_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(SetupError, match=r"^the database is away for 0 s: connection refused\. Bring it back") as error:
        outlast_outage(Away(99), stop=threading.Event(), limit_s=0.05)
    assert "\n" not in str(error.value)
