from __future__ import annotations

import random
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from functools import partial

import pytest

from workers.stage_threads import StageThreads, StageTimeout

WITHIN_S = 20.0


def spin(started: threading.Event) -> None:
    started.set()
    while True:
        pass


def test_a_call_gives_its_result_or_its_error():
    threads = StageThreads("stage")
    assert threads.submit(lambda: 7).result(WITHIN_S) == 7
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(WITHIN_S)


def test_a_call_that_loops_is_interrupted_and_may_clear_up():
    started, cleared = threading.Event(), threading.Event()

    def careless() -> None:
        try:
            try:
                spin(started)
            except Exception:  # noqa: BLE001  # what a handler may do
                pytest.fail("swallowed")
        finally:
            cleared.set()

    work = StageThreads("stage").submit(careless)
    assert started.wait(WITHIN_S)
    assert not work.done()
    assert work.cancel()
    with pytest.raises(StageTimeout):
        work.result(WITHIN_S)
    assert cleared.is_set()


def test_a_call_that_hangs_holds_up_no_other():
    threads, started, released = StageThreads("stage"), threading.Event(), threading.Event()

    def stubborn() -> int:
        while not released.is_set():
            with suppress(StageTimeout):
                started.set()
                released.wait()
        return 8

    hanging = threads.submit(stubborn)
    assert started.wait(WITHIN_S)
    hanging.cancel()
    assert [threads.submit(partial(int, n)).result(WITHIN_S) for n in range(3)] == [0, 1, 2]
    assert not hanging.done()
    released.set()
    assert hanging.result(WITHIN_S) == 8


def test_a_call_that_has_ended_is_not_interrupted():
    work = StageThreads("stage").submit(lambda: 7)
    assert work.result(WITHIN_S) == 7
    assert not work.cancel()
    assert work.result() == 7


def test_interruptions_at_any_moment_hit_their_own_call_and_no_later_one():
    threads, rng = StageThreads("stage"), random.Random(0)

    def count(num: int) -> int:
        return sum(1 for _ in range(num))

    def one() -> None:
        work = threads.submit(lambda: count(2_000))
        time.sleep(rng.random() * 0.0003)
        work.cancel()
        assert wait([work], WITHIN_S).done
        error = work.exception()
        assert isinstance(error, StageTimeout) if error else work.result() == 2_000
        assert threads.submit(lambda: count(50)).result(WITHIN_S) == 50

    for _ in range(500):
        one()
