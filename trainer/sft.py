"""Supervised training of a model, before a run or on what a run found; what it writes can be a run's `model`.

python -m trainer sft --model DIR --rows rows.jsonl --held-out other.jsonl --learning-rate 1e-5 --out DIR
python -m trainer sft --model DIR --run NAME --min-reward 1 --lora-rank 16 --out DIR
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from transformers import AutoConfig

from common.config import RunConfig
from common.config_errors import first_problem
from common.db.session import Database, check_schema
from common.errors import RollmillError, SetupError
from common.model_folder import read_model_shape
from common.settings import settings
from trainer.imitation import Imitator
from trainer.new_folder import new_folder
from trainer.publish import version_writer
from trainer.ranks import Ranks
from trainer.sft_options import parse, train_section
from trainer.sft_rows import WeightedRow, read_rows, rows_of_run

FINAL_RATE_SHARE = 0.05
"""The last phase's learning rates fall linearly to this share."""


def main(argv: Sequence[str]) -> int:
    """Train as the command line says. Exit code 2 = something outside has to be mended."""
    arguments = parse(argv)
    try:
        config = _config(arguments)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            _lead(arguments, config, Ranks.alone())
            return 0
        ranks = Ranks.join()
        try:
            if ranks.rank == 0:
                _lead(arguments, config, ranks)
            else:
                ranks.follow(Imitator.load(config, ranks=ranks))
        finally:
            ranks.leave()
    except (RollmillError, OSError, SafetensorError) as error:
        sys.stderr.write(f"trainer sft: {error}\n")
        return 2
    return 0


def _config(arguments: argparse.Namespace) -> RunConfig:
    """What the policy is loaded from: its log-probs are at temperature 1."""
    document = {"name": "sft", "model": arguments.model, "seed": arguments.seed, "train": train_section(arguments)}
    try:
        return RunConfig.model_validate(document | {"rollout": {"temperature": 1.0, "top_p": 1.0}})
    except ValidationError as error:
        raise SetupError(first_problem(error, RunConfig)) from None


def _lead(arguments: argparse.Namespace, config: RunConfig, ranks: Ranks) -> None:
    """Read, train and write, as the only rank or the first."""
    started = time.monotonic()
    if not (config.model / "tokenizer.json").is_file():
        raise SetupError(f"model folder {config.model} has no tokenizer.json: engines could not serve what comes out")
    phases, held_out = _read(arguments)
    steps = arguments.steps or [math.ceil(len(rows) / arguments.batch_size) for rows in phases]
    with new_folder(arguments.out, replace=arguments.force) as draft:
        policy = Imitator.load(config, ranks=ranks)
        if arguments.optimizer == "muon":
            policy.add_muon()
        loss, held_out_loss = train(
            policy,
            phases,
            steps=steps,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            held_out=held_out,
            held_out_every=arguments.held_out_every,
        )
        dtype = getattr(torch, arguments.dtype) if arguments.dtype else _dtype_of(config.model)
        version_writer(policy.finished(config, dtype=dtype), start=config.model)(draft)
    sys.stdout.write(
        f"sft: steps={sum(steps)} rows={sum(map(len, phases))} loss={loss:.4f} "
        f"held_out_loss={'none' if held_out_loss is None else f'{held_out_loss:.4f}'} "
        f"seconds={time.monotonic() - started:.1f}\n"
    )


def _read(arguments: argparse.Namespace) -> tuple[list[list[WeightedRow]], list[WeightedRow]]:
    """The rows of each phase, and the held-out ones, of which there may be none."""
    shape = read_model_shape(arguments.model)
    held_out = read_rows(arguments.held_out, shape=shape) if arguments.held_out else []
    if arguments.run is None:
        return [read_rows(path, shape=shape) for path in arguments.rows], held_out
    url = settings().database_url
    if url is None:
        raise SetupError(
            f"--run {arguments.run}: ROLLMILL_DATABASE_URL is not set: set it, or give the same options to "
            "`rollmill sft`, which takes the database in a data folder of `rollmill up`"
        )
    database = Database.connect(url, pool_size=1)
    try:
        check_schema(database)
        rows = rows_of_run(database, arguments.run, min_reward=arguments.min_reward, model=arguments.model, shape=shape)
    finally:
        database.dispose()
    return [rows], held_out


def train(
    policy: Imitator,
    phases: Sequence[Sequence[WeightedRow]],
    *,
    steps: Sequence[int],
    batch_size: int,
    seed: int,
    held_out: Sequence[WeightedRow] = (),
    held_out_every: int = 50,
) -> tuple[float, float | None]:
    """Run the phases in order, `steps` optimizer steps each, with a progress bar on stderr.

    Returns the last step's loss and the held-out one after it, in nats; None = there are no held-out rows.
    """
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    drawn = [batches(rows, size=batch_size, seed=f"{seed}:{phase}") for phase, rows in enumerate(phases)]
    loss, held_out_loss, total = math.nan, None, sum(steps)
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        bar = progress.add_task("", total=total)
        for step, (phase, share) in enumerate(schedule(steps, warmup_steps=policy.train.warmup_steps), start=1):
            loss, grad_norm = policy.imitate(next(drawn[phase]), step=step, rate_share=share)
            progress.update(bar, advance=1, description=f"loss {loss:.3f} grad_norm {grad_norm:.2f}")
            if held_out and (step % held_out_every == 0 or step == total):
                held_out_loss = policy.imitation_loss(held_out)
                console.print(f"step {step}/{total}: loss {loss:.4f}, held-out loss {held_out_loss:.4f}")
    return loss, held_out_loss


def batches(rows: Sequence[WeightedRow], *, size: int, seed: str) -> Iterator[list[WeightedRow]]:
    """Batches without end, shuffled by the seed; each row comes once before any comes again."""
    drawn = _passes(rows, random.Random(seed))
    while True:
        yield list(islice(drawn, size))


def _passes(rows: Sequence[WeightedRow], randomness: random.Random) -> Iterator[WeightedRow]:
    while True:
        yield from randomness.sample(rows, k=len(rows))


def schedule(steps: Sequence[int], *, warmup_steps: int) -> Iterator[tuple[int, float]]:
    """(phase, share of the learning rates) of each step: linear warm-up at first, linear decay in the last phase."""
    done = 0
    for phase, num_steps in enumerate(steps):
        for step in range(num_steps):
            warm = min(1.0, (done + 1) / warmup_steps) if warmup_steps else 1.0
            decay = 1 - (1 - FINAL_RATE_SHARE) * step / num_steps if phase == len(steps) - 1 else 1.0
            yield phase, warm * decay
            done += 1


def _dtype_of(model: Path) -> torch.dtype:
    """What the model folder's weights are in."""
    dtype = AutoConfig.from_pretrained(model, local_files_only=True).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
