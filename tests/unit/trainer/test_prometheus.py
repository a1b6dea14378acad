from __future__ import annotations

import socket
import urllib.request
from typing import Never

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import SetupError
from trainer.prometheus import StepCollector, serving
from trainer.tracking import SinkThread, Tracker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def samples_of(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_those_of_the_newest_step_and_sums_since_the_start() -> None:
    def open_sink(first: int) -> Never:
        raise ConnectionError("away")

    port, sink = free_port(), SinkThread("wandb", open_sink)
    collector = StepCollector("run-a", [sink])
    with serving(collector, host="127.0.0.1", port=port):
        before = samples_of(port)
        assert ("rollmill_trainer_version", "run-a") not in before
        with Tracker([sink], on_step=collector.update) as tracker:
            tracker.log(6, {"reward_mean": 0.25, "num_episodes": 8, "num_tokens": 100})
            lags = {"lag_mean": 0.25, "lag_0_fraction": 0.75, "lag_1_fraction": 0.25, "lag_10_fraction": 0}
            tracker.log(7, {"reward_mean": 0.75, "num_episodes": 8, "num_tokens": 120, "eval/reward": 1, **lags})
        found = samples_of(port)
    assert found["rollmill_trainer_version", "run-a"] == 7
    assert found["rollmill_trainer_reward_mean", "run-a"] == 0.75
    assert found["rollmill_trainer_eval_reward", "run-a"] == 1
    assert found["rollmill_trainer_lag_mean", "run-a"] == 0.25
    by_lag = {labels[0]: value for (name, *labels), value in found.items() if name == "rollmill_trainer_lag_fraction"}
    assert by_lag == {"0": 0.75, "1": 0.25, "10": 0}
    assert not any("lag_0" in name for name, *_ in found)
    assert found["rollmill_trainer_steps_total", "run-a"] == 2
    assert found["rollmill_trainer_tokens_total", "run-a"] == 220
    assert found["rollmill_trainer_tracking_lost_total", "run-a", "wandb"] == 2
    assert found["process_resident_memory_bytes",] > 1e6


def test_a_port_that_is_taken_is_refused_by_its_setting() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with (
            pytest.raises(SetupError, match=f"^ROLLMILL_METRICS_PORT={port}: 127.0.0.1:{port} can't be had: "),
            serving(StepCollector("run-a", []), host="127.0.0.1", port=port),
        ):
            pass
