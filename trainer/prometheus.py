"""Serves the trainer's metrics to Prometheus: those of its newest step, and sums since it started."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import SetupError
from trainer.tracking import Metrics, SinkThread

JOIN_S = 5.0
PREFIX = "rollmill_trainer"
SUMS = {"steps": None, "episodes": "num_episodes", "tokens": "num_tokens"}
"""Counter -> the step's metric that it sums; None = the steps themselves."""

LAG = re.compile(r"lag_(\d+)_fraction")
"""The step's metrics that are one here, with a label."""


class StepCollector(Collector):
    """What Prometheus is told of one run: `rollmill_trainer_<metric>{run="…"}`; of lag_fraction also `lag="0"`."""

    def __init__(self, run: str, sinks: Sequence[SinkThread]) -> None:
        self._run = run
        self._sinks = sinks
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._sums = dict.fromkeys(SUMS, 0.0)

    def update(self, version: int, metrics: Metrics) -> None:
        """Take over the metrics of the step that made `version`."""
        newest = {re.sub("[^a-zA-Z0-9_]", "_", name): value for name, value in metrics.items()}
        with self._lock:
            self._newest = newest | {"version": float(version), "last_step_timestamp_seconds": time.time()}
            for counter, name in SUMS.items():
                self._sums[counter] += 1.0 if name is None else newest.get(name, 0.0)

    def collect(self) -> Iterator[Metric]:
        """One gauge for each metric of the newest step, the lags' shares in one, the sums, and what the sinks lost."""
        with self._lock:
            newest, sums = self._newest, dict(self._sums)
        by_lag = {found[1]: value for name, value in newest.items() if (found := LAG.fullmatch(name))}
        if by_lag:
            of_lags = GaugeMetricFamily(
                f"{PREFIX}_lag_fraction",
                "share of the newest step's tokens so many versions old",
                labels=["run", "lag"],
            )
            for lag, share in by_lag.items():
                of_lags.add_metric([self._run, lag], share)
            yield of_lags
        for name, value in newest.items():
            if LAG.fullmatch(name):
                continue
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", f"{name} of the newest step", labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        for name, value in sums.items():
            counter = CounterMetricFamily(f"{PREFIX}_{name}", f"{name} since the process started", labels=["run"])
            counter.add_metric([self._run], value)
            yield counter
        lost = CounterMetricFamily(f"{PREFIX}_tracking_lost", "steps that a sink did not keep", labels=["run", "sink"])
        for sink in self._sinks:
            lost.add_metric([self._run, sink.name], sink.num_dropped + sink.num_failed)
        yield lost


@contextmanager
def serving(collector: StepCollector, *, host: str, port: int) -> Iterator[None]:
    """Answer http://host:port/metrics within the block. Raises SetupError where the port can't be had."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise SetupError(
            f"ROLLMILL_METRICS_PORT={port}: {host}:{port} can't be had: {error.strerror}. "
            "Each trainer needs a port of its own"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        # It answers nobody any more; a client that hangs in the middle of an answer must not hold up the end.
        thread.join(JOIN_S)
