from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from common.errors import EpisodeError
from common.outcomes import Outcome
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


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt()])
def test_an_exit_of_a_handler_ends_its_own_work_alone(loop: RunLoop, error: BaseException):
    async def leave() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        loop.work(leave()).result(WITHIN_S)
    assert loop.answers(within_s=WITHIN_S)


def test_a_loop_that_stays_blocked_is_lost_and_the_one_who_blocks_it_blamed():
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = RunLoop(on_lost=lost.put, late_s=0.1, lost_s=0.1)
    released = threading.Event()

    async def innocent() -> str:
        await asyncio.sleep(0)
        return "done"

    async def block() -> None:
        await asyncio.sleep(0)
        released.wait(WITHIN_S)

    guilty = loop.work(block())
    assert "test_run_loop.py" in lost.get(timeout=WITHIN_S)
    waiting = loop.work(innocent())
    with pytest.raises(EpisodeError, match=r"blocks the event loop of RUN in .*test_run_loop.py") as blamed:
        guilty.result(WITHIN_S)
    assert blamed.value.outcome is Outcome.STAGE_TIMEOUT
    assert loop.is_blocked
    assert not waiting.done()
    released.set()
    assert waiting.result(WITHIN_S) == "done"
    loop.close()
