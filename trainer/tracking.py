"""Sends the metrics of each step where people look, beside Postgres: to Prometheus, and to sinks in their own threads.

Who waits for whom: a sink's thread waits for metrics; the trainer waits for no sink, but up to CLOSE_S at its end.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, Self

from common.config_tracking import SinkName, TrackingConfig
from common.errors import SetupError

logger = logging.getLogger(__name__)

PACKAGES: Mapping[SinkName, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What to install for a sink. Its module has the sink's name."""
MAX_WAITING = 1000
"""Steps that wait for a slow sink; further ones are dropped for it, and counted."""
CLOSE_S = 10.0
"""How long all sinks together may take to write what waits, at the end of the process."""
THREAD_PREFIX = "tracking-"

Metrics = Mapping[str, float]


class Sink(Protocol):
    """A place for metrics. It is made, used and closed in one thread, and may do there what it likes."""

    def log(self, version: int, metrics: Metrics) -> None:
        """Keep the metrics of the step that made `version`."""

    def close(self) -> None:
        """Write what is not written yet."""


OpenSink = Callable[[int], Sink]
"""Makes a sink whose first metrics are those of a version."""


def check_installed(tracking: TrackingConfig) -> None:
    """Raise SetupError for a sink whose package is not there."""
    for name in tracking.sinks:
        if find_spec(name) is None:
            raise SetupError(
                f"tracking.sinks: {name} is not installed here: pip install {PACKAGES[name]}, or take it off the list"
            )


class SinkThread:
    """One sink behind a bounded queue: nothing that it does reaches the trainer."""

    def __init__(self, name: str, open_sink: OpenSink, *, max_waiting: int = MAX_WAITING) -> None:
        self.name = name
        self.num_dropped = 0
        """Steps that found the queue full."""
        self.num_failed = 0
        """Steps that the sink, or opening it, raised for."""
        self._open_sink = open_sink
        self._waiting: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(max_waiting)
        # A daemon: a sink that hangs must not hold the process.
        self._thread = threading.Thread(target=self._work, name=f"{THREAD_PREFIX}{name}", daemon=True)
        self._thread.start()

    def put(self, version: int, metrics: Metrics) -> None:
        """Hand over a step's metrics, or drop them; returns at once."""
        try:
            self._waiting.put_nowait((version, metrics))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("tracking falls behind, metrics are dropped: sink=%s version=%d", self.name, version)

    def stop(self) -> None:
        """Ask it to write what waits and close; returns at once."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
            return
        with suppress(queue.Empty):
            self._waiting.get_nowait()
            self.num_dropped += 1
        # Nobody else puts anything, so there is room now.
        self._waiting.put_nowait(None)

    def join(self, *, deadline: float) -> bool:
        """Wait for the end of the thread until the monotonic time `deadline`; False = it goes on."""
        self._thread.join(max(deadline - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _work(self) -> None:
        sink: Sink | None = None
        while (item := self._waiting.get()) is not None:
            version, metrics = item
            try:
                # One that could not be opened is tried again with the next step: its server may be back.
                sink = sink or self._open_sink(version)
                sink.log(version, metrics)
            except (Exception, SystemExit):
                self.num_failed += 1
                if self.num_failed == 1:
                    logger.exception("tracking failed, training goes on: sink=%s version=%d", self.name, version)
        try:
            if sink is not None:
                sink.close()
        except (Exception, SystemExit):
            logger.exception("tracking not closed: sink=%s", self.name)


class Tracker:
    """All sinks of a trainer. Context manager: closes them, within CLOSE_S, at the end of the block."""

    def __init__(self, sinks: Sequence[SinkThread], *, on_step: Callable[[int, Metrics], None] | None = None) -> None:
        """`on_step` is told first, in the caller's thread: it must be quick and not fail."""
        self.sinks = sinks
        self._on_step = on_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, version: int, metrics: Metrics) -> None:
        """Hand the metrics of the step that made `version` to all sinks; returns at once, and never raises."""
        copy = dict(metrics)
        if self._on_step is not None:
            self._on_step(version, copy)
        for sink in self.sinks:
            sink.put(version, copy)

    def close(self, *, limit_s: float = CLOSE_S) -> None:
        """Let the sinks write what waits, for `limit_s` in all, and say what was lost."""
        for sink in self.sinks:
            sink.stop()
        deadline = time.monotonic() + limit_s
        for sink in self.sinks:
            if not sink.join(deadline=deadline):
                logger.warning("tracking hangs, left as it is: sink=%s", sink.name)
            if sink.num_dropped or sink.num_failed:
                logger.warning(
                    "tracking is incomplete: sink=%s dropped=%d failed=%d steps; all of them are in Postgres",
                    sink.name,
                    sink.num_dropped,
                    sink.num_failed,
                )


def leave(code: int) -> None:
    """End the process; also where a sink hangs, whose library would wait for it on the way out."""
    if any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
