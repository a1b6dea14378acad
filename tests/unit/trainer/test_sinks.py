"""The sinks with their real packages, off line, each where it is installed. A run that goes on is one run there."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RunConfig
from trainer.sinks import tracking


def log_twice(config: RunConfig, data_dir: Path) -> None:
    """Two processes of a trainer: the second trains version 2 again, whose commit did not arrive."""
    for versions in ((1, 2), (2, 3)):
        with tracking(config, data_dir=data_dir, host="127.0.0.1", port=None) as tracker:
            for version in versions:
                tracker.log(version, {"reward_mean": version / 10 + versions[0], "num_tokens": 100.0})
        (sink,) = tracker.sinks
        assert (sink.num_failed, sink.num_dropped) == (0, 0)


def run_with(sink: str) -> RunConfig:
    return RunConfig.model_validate({"name": "run-a", "model": "m", "tracking": {"sinks": [sink]}})


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(run_with("tensorboard"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "run-a"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/reward_mean")]
    assert points == [(1, pytest.approx(1.1)), (2, pytest.approx(2.2)), (3, pytest.approx(2.3))]


@pytest.mark.filterwarnings("default")
def test_weights_and_biases_gets_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice(run_with("wandb"), tmp_path)
    assert len(list((tmp_path / "wandb").glob("offline-run-*-run-a"))) == 2


@pytest.mark.filterwarnings("default")
def test_mlflow_has_one_run_with_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_twice(run_with("mlflow"), tmp_path)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("rollmill").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-a", "FINISHED")
    assert {point.step for point in client.get_metric_history(run.info.run_id, "train/reward_mean")} == {1, 2, 3}
