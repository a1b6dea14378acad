"""The decoding thread, which alone touches the batch and the model; everyone else sends it commands.

It runs them between two steps, so that a command sees and leaves whole requests and whole weights.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from common.errors import RollmillError
from workers.engine.batch import Batch, PauseMode
from workers.engine.request import Completion, Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_WAIT_S = 1.0


class EngineDead(RollmillError):
    """The decoding thread has ended; nothing is served until the process is started anew."""

    def __init__(self) -> None:
        super().__init__("the decoding thread has ended; see the log, and start the engine anew")


@dataclass(frozen=True)
class _Command:
    """What to do between two steps, and the future that must not be left waiting."""

    act: Callable[[], None]
    future: Future[Any]

    def run(self) -> None:
        try:
            self.act()
        except Exception as error:
            self.future.set_exception(error)
            raise


class DecodingThread:
    """Decodes a batch until it is stopped. Every future that it gives fails with EngineDead once it has ended."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._stopping = False
        self._ended = threading.Event()
        self._sending = threading.Lock()
        """Held while a command is queued and while the end is declared, so that none is queued unseen."""
        self._thread = threading.Thread(target=self._main, name="decoding", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float) -> bool:
        """Abort all requests and end the thread; False when a step took longer than `timeout_s`."""
        self._send(_Command(self._stop, Future()))
        return self._ended.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def call(self, action: Callable[[Batch], T]) -> Future[T]:
        """Run an action between two steps; gives its result."""
        result: Future[T] = Future()
        self._send(_Command(lambda: result.set_result(action(self._batch)), result))
        return result

    def submit(self, request: Request) -> Future[Completion]:
        """Queue a request; gives its result when it leaves the batch."""
        self._send(_Command(lambda: self._batch.add(request), request.future))
        return request.future

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> Future[None]:
        """See Batch.pause; done when the mode's promise holds."""
        done: Future[None] = Future()
        self._send(_Command(lambda: self._batch.pause(mode, done, clear_cache=clear_cache), done))
        return done

    def _send(self, command: _Command) -> None:
        command.future.set_running_or_notify_cancel()  # from here on, only the decoding thread ends it
        with self._sending:
            if not self._ended.is_set():
                self._commands.put(command)
                return
        command.future.set_exception(EngineDead())

    def _main(self) -> None:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                self._loop()
        except Exception:
            logger.exception("the decoding thread failed")
        finally:
            with self._sending:
                self._ended.set()
            self._fail_all()

    def _loop(self) -> None:
        """Waits for commands while nothing can be decoded; any command wakes it, `stop` ends it."""
        while not self._stopping:
            busy = self._batch.advance()
            self._run_commands(block=not busy)

    def _run_commands(self, *, block: bool) -> None:
        try:
            command = self._commands.get(block=block, timeout=_IDLE_WAIT_S)
            while True:
                command.run()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._batch.abort(lambda request: True)
        self._stopping = True

    def _fail_all(self) -> None:
        """Leave nobody waiting."""
        futures = self._batch.open_futures()
        while not self._commands.empty():
            futures.append(self._commands.get_nowait().future)
        for future in futures:
            future.set_exception(EngineDead())
