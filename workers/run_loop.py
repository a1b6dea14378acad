"""The one asyncio loop of a RUN process, in a thread of its own: hundreds of episodes share it.

A second thread watches it: a handler that blocks, where it should await, holds up all of them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from common.errors import EpisodeError
from common.outcomes import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_BLOCKING_THREADS = 16
STOP_TIMEOUT_S = 10.0
LATE_S = 5.0
"""A loop that has not answered for so long is blocked: no new work for it."""
LOST_S = 20.0
"""After so long more it is not waited for."""
WATCH_EVERY_S = 1.0


class LoopWork(Future[T], Generic[T]):
    """A coroutine on a loop. `cancel` cancels it, and the future is done only when the coroutine has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._start, coroutine)

    def cancel(self) -> bool:
        self._loop.call_soon_threadsafe(self._cancel)
        return not self.done()

    # What follows runs on the loop.

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(_contained(coroutine))
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "the loop starts it before it cancels it"
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if self.done():
            return
        if task.cancelled():
            self.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())

    # What follows runs on the thread that watches the loop.

    def runs_now(self) -> bool:
        """Whether the loop is in the middle of it."""
        return self._task is not None and asyncio.current_task(self._loop) is self._task

    def blame(self, where: str) -> None:
        """End the work, as far as whoever waits for it is concerned; the coroutine may hang for ever."""
        if not self.done():
            self.set_exception(EpisodeError(Outcome.STAGE_TIMEOUT, f"blocks the event loop of RUN in {where}"))


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """asyncio ends its loop for these two, whoever raised them: here it was a handler."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class RunLoop:
    """Runs coroutines for threads. Blocking calls inside them go to `asyncio.to_thread`, never on the loop."""

    def __init__(
        self, *, on_lost: Callable[[str], object] = lambda where: None, late_s: float = LATE_S, lost_s: float = LOST_S
    ) -> None:
        """`on_lost` is called once, with the place in the code that does not let go of the loop."""
        self._on_lost = on_lost
        self._late_s = late_s
        self._lost_s = lost_s
        self._works: set[LoopWork[Any]] = set()
        self._closed = threading.Event()
        self.is_blocked = False
        """It has not answered for `late_s`."""
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(NUM_BLOCKING_THREADS, thread_name_prefix="run-blocking"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="run-loop", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="run-loop-watch", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it, and is not waited for."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def work(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it, and the future is done when that has ended it."""
        work = LoopWork(self.loop, coroutine)
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        return work

    def answers(self, *, within_s: float) -> bool:
        """Whether the loop still turns: a handler that blocks holds up all episodes of the process."""
        answered = threading.Event()
        try:
            self.loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return False  # it is closed
        return answered.wait(within_s)

    def _watch(self) -> None:
        """Waits for: an answer of the loop, and the next look. Ends when the loop is closed or lost."""
        while not self._closed.wait(WATCH_EVERY_S):
            if self.answers(within_s=self._late_s):
                self.is_blocked = False
                continue
            if self._closed.is_set():
                return
            self.is_blocked = True
            logger.error("the event loop does not answer for %g s: it is in %s", self._late_s, self._where())
            if self.answers(within_s=self._lost_s) or self._closed.is_set():
                continue
            where = self._where()
            for work in [work for work in list(self._works) if work.runs_now()]:
                work.blame(where)
            self._on_lost(where)
            return

    def _where(self) -> str:
        """The innermost places of the loop's thread, in words."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        calls = traceback.extract_stack(frame)[-4:] if frame is not None else []
        return ", ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls) or "a thread that is gone"

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        self._closed.set()
        self.submit(_cancel_all()).result(STOP_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
