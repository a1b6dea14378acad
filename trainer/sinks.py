"""The sinks that tracking.py knows by name. Each imports its package when it is opened, in its own thread."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common.config import RunConfig
from common.config_tracking import SinkName
from trainer.prometheus import StepCollector, serving
from trainer.tracking import Metrics, OpenSink, Sink, SinkThread, Tracker


class TensorBoard:
    """Event files in `<data_dir>/tensorboard/<run>`."""

    def __init__(self, first: int, *, config: RunConfig, data_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process wrote of this version or later ones is hidden: it is trained anew.
        self._writer: Any = SummaryWriter(data_dir / "tensorboard" / config.name, purge_step=first)

    def log(self, version: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"train/{name}", value, version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases with the run's name, gone on with when the trainer starts again.

    Its own variables say where and how: WANDB_API_KEY, WANDB_MODE, WANDB_BASE_URL, WANDB_ENTITY …
    """

    def __init__(self, first: int, *, config: RunConfig, data_dir: Path) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=config.tracking.project,
            id=config.name,
            name=config.name,
            resume="allow",
            dir=data_dir,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),
        )

    def log(self, version: int, metrics: Metrics) -> None:
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=version)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow with the run's name, gone on with when the trainer starts again.

    MLFLOW_TRACKING_URI says where; without it, a SQLite file in the data folder.
    """

    def __init__(self, first: int, *, config: RunConfig, data_dir: Path) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{data_dir / 'mlflow.db'}"
        )
        project = config.tracking.project
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        earlier = self._client.search_runs([experiment], f"attributes.run_name = '{config.name}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(experiment, run_name=config.name)
        self._run_id: str = run.info.run_id

    def log(self, version: int, metrics: Metrics) -> None:
        now_ms = int(time.time() * 1000)
        batch = [self._metric(f"train/{name}", value, now_ms, version) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


SINKS: Mapping[SinkName, type[TensorBoard] | type[WeightsAndBiases] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


@contextmanager
def tracking(config: RunConfig, *, data_dir: Path, host: str, port: int | None) -> Iterator[Tracker]:
    """The tracker of a run: its sinks, and Prometheus where a port is given. Raises SetupError if it is taken."""
    sinks = start_sinks(config, data_dir=data_dir)
    collector = StepCollector(config.name, sinks)
    with Tracker(sinks, on_step=collector.update) as tracker:
        if port is None:
            yield tracker
        else:
            with serving(collector, host=host, port=port):
                yield tracker


def start_sinks(config: RunConfig, *, data_dir: Path) -> list[SinkThread]:
    """The run's sinks, each in its thread. They open with their first metrics."""
    started = []
    for name in config.tracking.sinks:
        open_sink: OpenSink = partial(_open, name, config=config, data_dir=data_dir)
        started.append(SinkThread(name, open_sink))
    return started


def _open(name: SinkName, first: int, *, config: RunConfig, data_dir: Path) -> Sink:
    return SINKS[name](first, config=config, data_dir=data_dir)
