"""Threads for the work of INIT and EVAL, which runs handlers' code: work that has been told to stop is interrupted."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class StageTimeout(BaseException):
    """Raised in the middle of a handler's code when the stage's budget is used up or the episode is no longer its own.

    Clear up and let it pass. No Exception, so that a handler's `except Exception` does not swallow it.
    """


class ThreadWork(Future[T], Generic[T]):
    """A call in a thread. `cancel` interrupts it, and the future is done only when the call has ended."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread that carries it out; None = not yet, or no longer."""
        self._interrupted = False

    def cancel(self) -> bool:
        """Raise StageTimeout in the call, once. A call that waits in C sees it when that returns."""
        with self._lock:
            if self._interrupted or self.done():
                return False
            self._interrupted = True
            if self._thread is not None:
                _raise_in(self._thread, StageTimeout)
        return True

    def carry_out(self) -> None:
        """The thread's part."""
        try:
            try:
                self._begin()
                result = self._call()
            finally:
                self._end()
        except BaseException as error:  # noqa: BLE001  # whoever waits for the future gets it
            self.set_exception(error)
        else:
            self.set_result(result)

    def _begin(self) -> None:
        with self._lock:
            if self._interrupted:
                raise StageTimeout
            self._thread = threading.get_ident()

    def _end(self) -> None:
        """From here on nothing is raised in this thread any more: not even what is on its way."""
        with self._lock:
            if self._thread is not None:
                _raise_in(self._thread, None)
            self._thread = None


class StageThreads:
    """As many threads as there are calls at once. They keep no process from ending, not even one that hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[ThreadWork[object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0

    def submit(self, call: Callable[[], T]) -> ThreadWork[T]:
        """Start the call at once."""
        work = ThreadWork(call)
        with self._lock:
            is_new = self._num_idle == 0
            self._num_idle -= not is_new
        if is_new:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._calls.put(work)  # type: ignore[arg-type]  # futures are invariant, though nobody sets this one's result
        return work

    def _serve(self) -> None:
        """Waits for: the next call, for the life of the process."""
        while True:
            self._calls.get().carry_out()
            with self._lock:
                self._num_idle += 1


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise the error in a running thread, between two of its steps; None takes back what was not yet raised."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
