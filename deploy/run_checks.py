"""Checks of a run's configuration that need more than the file: its model, its tasks, its handler."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from common.config import RunConfig
from common.dataset import read_lines
from common.errors import SetupError
from common.model_folder import is_adapter, no_model, read_model_shape
from common.plan import check_fits_model
from deploy.handlers import check_handler
from deploy.templates import check_template


def with_model(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths. Raises SetupError where the model is missing."""
    model = config.model.absolute()
    if is_adapter(model):
        raise SetupError(f"run {config.name}: {no_model(model)}")
    if not (model / "config.json").exists():
        raise SetupError(f"model folder {model} of run {config.name} holds no model: there is no config.json in it")
    return config.model_copy(
        update={
            "model": model,
            "dataset": _absolute(config.dataset),
            "eval": config.eval and config.eval.model_copy(update={"dataset": _absolute(config.eval.dataset)}),
        }
    )


def _absolute(path: Path | None) -> Path | None:
    return path.absolute() if path is not None else None


def with_tasks(config: RunConfig) -> RunConfig:
    """The configuration. Raises SetupError for a data set that cannot be read."""
    for dataset in (config.dataset, None if config.eval is None else config.eval.dataset):
        if dataset is not None:
            for _ in read_lines(dataset):
                pass
    return config


def with_handler(config: RunConfig) -> RunConfig:
    """The configuration. Raises SetupError for a handler that nobody has registered, or that cannot be loaded, and for
    a model whose prompts could not be made, or whose context is shorter than the lengths asked for."""
    known = sorted(entry_points(group="rollmill.handlers").names)
    if ":" not in config.handler and config.handler not in known:
        raise SetupError(
            f"run {config.name}: unknown handler {config.handler!r}: known are {', '.join(known)}; "
            "an own one is given as package.module:Class"
        )
    check_handler(config)
    check_template(config)
    check_fits_model(config, read_model_shape(config.model))
    return config
