"""Section [tracking] of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from common.config_section import Section

SinkName = Literal["tensorboard", "wandb", "mlflow"]


class TrackingConfig(Section):
    """Where each step's metrics go, beside Postgres and Prometheus. May be another at each start of the trainer."""

    sinks: tuple[SinkName, ...] = ()
    """Their packages must be installed with the trainer. None of them can stop or delay training, and none is filled up
    with the steps that it missed, such as the last one before a crash: Postgres alone has all."""
    project: str = Field(default="rollmill", min_length=1)
    """Project of Weights & Biases, experiment of MLflow."""

    @field_validator("sinks")
    @classmethod
    def _each_once(cls, sinks: tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        if len(set(sinks)) < len(sinks):
            raise ValueError(f"each sink once, not {list(sinks)}")
        return sinks
