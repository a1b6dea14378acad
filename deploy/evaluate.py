"""`rollmill eval`: plays tasks with a model on the one-machine stack, without a trainer, and says how it did.

It is a run that trains nothing: its version 0 is the model, and its one evaluation is version 0's.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.config import EvalConfig, RunConfig
from common.config_train import TrainConfig
from common.dataset import read_lines
from common.db import evaluations, runs, versions
from common.db.evaluations import Evaluation
from common.errors import SetupError
from common.model_folder import is_adapter
from common.object_store import open_store
from common.settings import Settings
from common.weights import MANIFEST
from deploy.engine import check_engine_installed, check_small_context
from deploy.local import LocalStack, StackAddresses, StackPlan
from deploy.local_run import OpenRun, Order
from deploy.merged import merged_model
from deploy.messages import logging_to
from deploy.progress import evaluated, short_failure
from deploy.report import check_writable
from deploy.watch import POLL_EVERY_S, RunReader, Stack

IN_FLIGHT = 256
"""Episodes at once, where a training run would leave room for its own."""
MERGED = "merged"
"""Folder below the data folder for models that are made of adapters."""
NAME_LIMIT = 50
"""Characters of the run's name, before what tells its evaluations from one another."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user wants played, beside the configuration. None = as that says."""

    model: Path | None
    dataset: Path | None
    episodes: int | None
    samples_per_task: int | None


def eval_config(config: RunConfig, asked: Asked) -> RunConfig:
    """The run that plays it. The data set is the one asked for, else that of [eval], else the run's own."""
    given = config.eval or EvalConfig()
    samples = asked.samples_per_task or given.samples_per_task
    dataset = asked.dataset or given.dataset or config.dataset
    num_tasks = given.num_tasks
    if asked.episodes is not None:
        num_tasks = math.ceil(asked.episodes / samples)
    elif dataset is not None and asked.dataset is not None:
        num_tasks = len(list(read_lines(dataset)))
    wanted = given.model_copy(
        update={
            "dataset": dataset and dataset.absolute(),
            # A data set has its tasks, and none are made.
            "seed": given.seed if dataset is None else EvalConfig().seed,
            "num_tasks": num_tasks,
            "samples_per_task": samples,
            "max_episodes_in_flight": max(IN_FLIGHT, samples),
        }
    )
    return config.model_copy(
        update={
            "name": f"{config.name[:NAME_LIMIT].rstrip('-')}-eval",
            "model": (asked.model or config.model).absolute(),
            "dataset": None,
            "train": TrainConfig(num_versions=0),
            "eval": wanted,
        }
    )


def whole_model(config: RunConfig, asked: Asked, *, data_dir: Path) -> Asked:
    """What was asked, with a model that an engine can be started with: a version that is an adapter is merged into the
    run's start weights. Raises SetupError."""
    if asked.model is None or not is_adapter(asked.model):
        return asked
    return replace(asked, model=merged_model(asked.model, base=config.model, root=data_dir / MERGED))


def evaluate_locally(order: Order, *, console: Console, model: Path | None = None) -> Evaluation:
    """Play the order's run to its end, show how the model did, and write the report file.

    `model` is what the user calls it; None = as the run does.
    Raises SetupError, and StopRequested after an orderly stop: the same command then goes on.
    """
    if order.report_file is not None:
        check_writable(order.report_file)
    check_engine_installed(order.engine)
    check_small_context(order.engine, order.config)
    data_dir = order.settings.data_dir
    plan = StackPlan(
        model_dir=order.config.model,
        trainer_config=None,
        broker=order.broker,
        engine=order.engine,
        max_row_tokens=order.config.rollout.max_row_tokens,
    )
    started_s = time.monotonic()
    console.print(f"starting on data folder {data_dir} …", highlight=False, soft_wrap=True)
    with (
        LocalStack(order.settings, plan) as stack,
        logging_to(stack.folder.log_file("rollmill"), level=order.settings.log_level, console=console),
        OpenRun(order, config_file=data_dir / "eval.toml") as opening,
    ):
        stack.start(lambda addresses: _open(opening, addresses, order.settings))
        _play(stack, opening, console=console)
        with opening.database.begin() as conn:
            runs.finish(conn, opening.run.id)
            (result,) = evaluations.results(conn, opening.run.name)
    _forget_merged(order.config.model, data_dir)
    model = (model or order.config.model).absolute()
    console.print(result_table(opening.run.config, result, model=model, took_s=time.monotonic() - started_s))
    if order.report_file is not None:
        document = {"run": opening.run.name, "model": str(model), **asdict(result)}
        order.report_file.write_text(json.dumps(document, indent=1) + "\n")
    return result


def _open(opening: OpenRun, addresses: StackAddresses, settings: Settings) -> None:
    """Open the run, and make the model's folder its version 0, unless an earlier start of this command has."""
    opening(addresses)
    config = opening.run.config
    if opening.resumed_from_version is not None:
        return
    store = open_store(settings.weights_url, folder=settings.data_dir / "weights")
    published = store.publish(config.name, 0, lambda folder: _fill(folder, config.model))
    with opening.database.begin() as conn:
        versions.publish(conn, opening.run.id, 0, published)


def _forget_merged(model: Path, data_dir: Path) -> None:
    """Delete what was made for this evaluation alone; version 0 of its run is the same."""
    if model.parent == data_dir / MERGED:
        shutil.rmtree(model)


def _fill(folder: Path, model: Path) -> None:
    for file in model.iterdir():
        if file.is_file() and file.name != MANIFEST:
            try:
                os.link(file.resolve(), folder / file.name)
            except OSError:
                shutil.copyfile(file, folder / file.name)


def _play(stack: Stack, opening: OpenRun, *, console: Console) -> None:
    """Waits for: the end of the evaluation. Raises what `stack.poll` raises, and SetupError if it cannot be fed."""
    assert opening.run.config.eval is not None
    most = opening.run.config.eval.num_tasks * opening.run.config.eval.samples_per_task
    with RunReader(opening.database, opening.run.id) as reader, _progress(console) as progress:
        task = progress.add_task("episodes", total=most, said="")
        while True:
            stack.poll()
            snapshot = reader.latest.snapshot
            if snapshot is not None and snapshot.error is not None:
                raise SetupError(f"run {opening.run.name} cannot be fed: {snapshot.error}")
            if snapshot is not None and snapshot.evaluations:
                now = snapshot.evaluations[-1]
                failure = snapshot.last_failure
                trouble = f"  last failure: {short_failure(str(failure))}" if failure else ""
                progress.update(
                    task,
                    completed=now.episodes - now.under_way,
                    total=now.episodes if now.finished else most,
                    said=escape(f"reward {evaluated(now)}{trouble}"),
                )
                if now.finished and not now.under_way:
                    return
            time.sleep(POLL_EVERY_S)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def result_table(config: RunConfig, result: Evaluation, *, model: Path, took_s: float) -> Table:
    """How the model did, and what is not in the figures."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("model", escape(str(model)))
    table.add_row("mean reward", f"[bold]{evaluated(result)}[/] (standard error over tasks)")
    for k, rate in enumerate(result.pass_at, start=1):
        if k in (1, 2, 4, 8, 16, 32, 64, len(result.pass_at)):
            table.add_row(f"pass@{k}", f"{rate:.3f}")
    table.add_row("episodes", f"{result.scored:,} scored of {result.episodes:,}, {result.tasks:,} tasks")
    lost = {"failed": result.failed, "mixed": result.mixed, "cancelled": result.cancelled}
    said = ", ".join(f"{num:,} {name}" for name, num in lost.items() if num)
    table.add_row("not counted", f"[bold red]{said}[/]" if said else "none")
    if result.error is not None:
        table.add_row("given up", f"[bold red]{escape(result.error)}[/]")
    table.add_row("seconds", f"{took_s:.1f}")
    table.add_row("run", f"{config.name}: `rollmill report {config.name}`")
    return table
