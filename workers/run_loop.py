"""The one asyncio loop of a RUN process, in a thread of its own: hundreds of episodes share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

NUM_BLOCKING_THREADS = 16
STOP_TIMEOUT_S = 10.0


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
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None, "the loop starts it before it cancels it"
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


class RunLoop:
    """Runs coroutines for threads. Blocking calls inside them go to `asyncio.to_thread`, never on the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(NUM_BLOCKING_THREADS, thread_name_prefix="run-blocking"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="run-loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it, and is not waited for."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def work(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it, and the future is done when that has ended it."""
        return LoopWork(self.loop, coroutine)

    def answers(self, *, within_s: float) -> bool:
        """Whether the loop still turns: a handler that blocks holds up all episodes of the process."""
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return answered.wait(within_s)

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
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
