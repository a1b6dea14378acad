from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from workers.run_loop import RunLoop

WITHIN_S = 20.0


@pytest.fixture
def loop() -> Iterator[RunLoop]:
    loop = RunLoop()
    yield loop
    loop.close()


def test_work_gives_its_result_or_its_error(loop: RunLoop):
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ValueError("no")

    assert loop.work(answer()).result(WITHIN_S) == 7
    with pytest.raises(ValueError, match="no"):
        loop.work(fail()).result(WITHIN_S)


def test_cancelled_work_is_done_only_when_it_has_cleared_up(loop: RunLoop):
    started, cancelled, may_end = threading.Event(), threading.Event(), asyncio.Event()

    async def careful() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await may_end.wait()

    work = loop.work(careful())
    assert started.wait(WITHIN_S)
    work.cancel()
    assert cancelled.wait(WITHIN_S)
    assert not work.done()
    loop.loop.call_soon_threadsafe(may_end.set)
    with pytest.raises(CancelledError):
        work.result(WITHIN_S)


def test_a_blocked_loop_does_not_answer(loop: RunLoop):
    started, released = threading.Event(), threading.Event()

    async def block() -> None:
        started.set()
        released.wait(WITHIN_S)

    assert loop.answers(within_s=WITHIN_S)
    work = loop.work(block())
    assert started.wait(WITHIN_S)
    assert not loop.answers(within_s=0.1)
    released.set()
    work.result(WITHIN_S)
    assert loop.answers(within_s=WITHIN_S)
