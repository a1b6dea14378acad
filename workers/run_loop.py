"""The one asyncio loop of a RUN process, in a thread of its own: hundreds of episodes share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

NUM_BLOCKING_THREADS = 16
STOP_TIMEOUT_S = 10.0


class RunLoop:
    """Runs coroutines for threads. Blocking calls inside them go to `asyncio.to_thread`, never on the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(NUM_BLOCKING_THREADS, thread_name_prefix="run-blocking"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="run-loop", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

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
