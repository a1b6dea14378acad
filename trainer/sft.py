"""Supervised warm start of a tiny policy on rows of ids and loss weights, one phase after the other.

python -m trainer sft --model DIR --rows clean.jsonl --rows sloppy.jsonl --steps 100 350 --out DIR
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.errors import SetupError
from trainer.tiny import save_model

BATCH_SIZE = 32
MUON_LR = 0.02
ADAMW_LR = 3e-3
FINAL_LR_SHARE = 0.05
"""The last phase's learning rates fall linearly to this share."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversation to imitate."""

    ids: tuple[int, ...]
    """[T] token ids."""
    weights: tuple[float, ...]
    """[T] loss weight of each id; 0 = given, not learned."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.weights):
            raise ValueError(f"{len(self.ids)} ids but {len(self.weights)} weights")
        for name, values in (("id", self.ids), ("weight", self.weights)):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not any(self.weights[1:]):
            raise ValueError("no id after the first has a weight, so there is nothing to learn")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded to the longest."""

    ids_BT: Tensor
    mask_BT: Tensor
    """1 where a row has an id, by length: a pad id may be a real token elsewhere."""
    weights_BT: Tensor


def load_rows(path: Path) -> list[Row]:
    """Read JSON lines of `ids` and `weights`. Raises SetupError that names the line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            value = json.loads(line)
            rows.append(Row(ids=tuple(value["ids"]), weights=tuple(value["weights"])))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{path}:{number}: not a row: {error!r}") from None
    if not rows:
        raise SetupError(f"{path} has no rows")
    return rows


def collate(rows: list[Row], *, pad_id: int) -> Batch:
    """Pad on the right; pads have mask 0 and weight 0."""
    width = max(len(row.ids) for row in rows)
    fill = [width - len(row.ids) for row in rows]
    return Batch(
        ids_BT=torch.tensor([[*row.ids, *[pad_id] * n] for row, n in zip(rows, fill, strict=True)]),
        mask_BT=torch.tensor([[1] * len(row.ids) + [0] * n for row, n in zip(rows, fill, strict=True)]),
        weights_BT=torch.tensor([[*row.weights, *[0.0] * n] for row, n in zip(rows, fill, strict=True)]),
    )


def weighted_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next id, weighted; scalar, in nats."""
    logits_BTV = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT).logits[:, :-1]
    loss_N = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), batch.ids_BT[:, 1:].flatten(), reduction="none"
    )
    weights_N = batch.weights_BT[:, 1:].flatten()
    return (loss_N * weights_N).sum() / weights_N.sum()


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon on the matrices, AdamW on the embedding and the norms.

    Muon orthogonalises each update (Jordan et al. 2024, "Muon: an optimizer for hidden layers"); Adam alone leaves
    a two-layer policy without the copying circuit for far longer than a minute.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: PreTrainedModel, phases: list[list[Row]], steps: list[int], *, seed: int) -> Iterator[float]:
    """Run the phases in order, `steps` optimizer steps each; yields each step's loss in nats."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model)
    pad_id = model.config.pad_token_id
    last = len(phases) - 1
    for phase, (rows, num_steps) in enumerate(zip(phases, steps, strict=True)):
        for step in range(num_steps):
            share = 1 - (1 - FINAL_LR_SHARE) * step / num_steps if phase == last else 1.0
            for optimizer, rate in zip(optimizers, (MUON_LR, ADAMW_LR), strict=True):
                optimizer.param_groups[0]["lr"] = rate * share
            loss = weighted_loss(model, collate(rng.choices(rows, k=BATCH_SIZE), pad_id=pad_id))
            torch.autograd.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            yield loss.item()


def train_folder(source: Path, row_files: list[Path], steps: list[int], out: Path, *, seed: int) -> None:
    """Train the model in `source` and write it, in float16, to `out`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    phases = [load_rows(path) for path in row_files]
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=sum(steps))
        for loss in train(model, phases, steps, seed=seed):
            progress.update(bar, advance=1, description=f"loss {loss:.3f}")
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, out)
    if out.resolve() != source.resolve():
        for name in TOKENIZER_FILES:
            shutil.copyfile(source / name, out / name)


def main(argv: Sequence[str]) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the start weights")
    parser.add_argument("--rows", type=Path, action="append", required=True, help="JSON lines, once per phase")
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="optimizer steps of each phase")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batches")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args(argv)
    if len(arguments.rows) != len(arguments.steps):
        parser.error(f"{len(arguments.rows)} --rows but {len(arguments.steps)} --steps")
    torch.set_num_threads(1)
    disable_progress_bar()
    try:
        train_folder(arguments.model, arguments.rows, arguments.steps, arguments.out, seed=arguments.seed)
    except (SetupError, OSError) as error:
        sys.exit(f"trainer sft: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
