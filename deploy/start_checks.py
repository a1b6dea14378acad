"""`rollmill up --dry-run`: the plan, and what the start of the run would refuse only when half of it is up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common.config import RunConfig
from common.db import runs
from common.db.session import Database, check_schema
from common.errors import SetupError
from common.model_folder import read_context
from common.plan import counted, plan
from common.settings import Settings
from deploy.access import live_url
from deploy.broker import check_broker
from deploy.engine import EngineKind, check_engine_installed, check_small_context
from deploy.local_run import check_goes_on

TRAINER_TIMEOUT_S = 120.0
"""It imports torch, and may ask a teacher some hundred ids."""
PROMPTS_TIMEOUT_S = 10.0
"""A handler may make its tasks for longer than anybody wants to wait here."""


def print_plan(
    config: RunConfig, *, config_file: Path, settings: Settings, engine: EngineKind, trainer: str = "trainer"
) -> None:
    """Say what `rollmill up` would do, and what of its start was checked. Raises SetupError where it could not."""
    check_engine_installed(engine)
    check_small_context(engine, config)
    engines = f"one, started here: {'the small CPU engine' if engine is EngineKind.SMALL else 'vLLM'}"
    sys.stdout.write(plan(config, settings=settings, engines=engines, unset="embedded, in the data folder"))
    for line in start_checks(config, config_file=config_file, settings=settings, trainer=trainer):
        sys.stdout.write(f"{'start':<13} {line}\n")


def start_checks(config: RunConfig, *, config_file: Path, settings: Settings, trainer: str) -> Iterator[str]:
    """A line for each thing that was checked, or could not be. Raises SetupError where the start would."""
    yield _run(config, settings)
    if settings.broker_url:
        check_broker(settings.broker_url)
        yield "checked: the broker takes connections"
    yield _prompts(config)
    if trainer == "trainer":
        yield from (f"checked: {line}" for line in _asked_trainer(config_file))
    else:
        yield f"not checked: what {trainer} needs"


def _run(config: RunConfig, settings: Settings) -> str:
    url = live_url(settings)
    if url is None:
        return f"not checked: whether there is a run {config.name} already, as no database is up"
    database = Database.connect(url)
    try:
        try:
            check_schema(database)
        except SetupError as error:
            return f"not checked: whether there is a run {config.name} already: {error}"
        with database.begin() as conn:
            run = runs.find_same(conn, config)
            if run is not None:
                check_goes_on(run, pause_reason=runs.pause_reason_of(conn, run.id))
    finally:
        database.dispose()
    if run is None:
        return f"checked: the database has no run {config.name} yet"
    return f"checked: run {config.name} is there already and would go on"


def _prompts(config: RunConfig) -> str:
    """The first tasks' first prompts against the shortest of what holds a row."""
    try:
        lengths = _first_prompts(config)
    except TimeoutError:
        return f"not checked: first prompts, which are not made after {PROMPTS_TIMEOUT_S:.0f} s"
    except ValueError as error:
        return f"not checked: first prompts: {error}"
    limits = [("rollout.max_row_tokens", config.rollout.max_row_tokens), ("the context", read_context(config.model))]
    limit, what = min(((value, name) for name, value in limits if value is not None), default=(None, ""))
    too_long = [length for length in lengths if limit is not None and length >= limit]
    if lengths and len(too_long) == len(lengths):
        raise SetupError(
            f"run {config.name}: the first prompts of its first {counted(len(lengths), 'task')} have {min(lengths)} to "
            f"{max(lengths)} ids, and {what} is {limit}: nothing could be sampled"
        )
    but = f"; {len(too_long)} of them leave no room, as {what} is {limit}: those will fail" if too_long else ""
    return (
        f"checked: the first prompts of {counted(len(lengths), 'task')} have up to {max(lengths, default=0):,} ids{but}"
    )


def _first_prompts(config: RunConfig) -> list[int]:
    """Raises TimeoutError, and ValueError with the last line of what went wrong."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "workers.first_prompts", config.model_dump_json()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROMPTS_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if done.returncode:
        raise ValueError(_last_line(done))
    # What the handler itself prints stands before.
    lengths: list[int] = json.loads(done.stdout.splitlines()[-1])
    return lengths


def _asked_trainer(config_file: Path) -> list[str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "--config", str(config_file), "--check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRAINER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"the trainer has not checked {config_file} after {TRAINER_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise SetupError(_last_line(done).removeprefix("trainer: "))
    return done.stdout.decode(errors="replace").splitlines()


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"
