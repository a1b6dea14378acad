"""The command line of `python -m trainer sft`, and the [train] section that it makes of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

OF_TRAIN = {
    "learning_rate": "of AdamW; default 1e-5, 1e-4 with --lora-rank, 3e-3 with --optimizer muon",
    "warmup_steps": "steps of linear warm-up; then, in the last phase, linear decay to a twentieth",
    "beta1": "of AdamW",
    "beta2": "of AdamW",
    "grad_clip": "largest gradient norm; default 1, none with --optimizer muon",
    "max_positions": "token positions of one forward and backward pass",
    "max_logits": "logits that exist at once",
    "attention": "sdpa, flash_attention_2 or flash_attention_3",
    "lora_rank": "train a LoRA adapter of this rank, which is merged into what is written",
    "lora_alpha": "its product is added times alpha / rank; default 2 x rank",
}
"""Options that are fields of [train], which also has their bounds and defaults."""
SWITCHES = {
    "packing": "rows without padding",
    "gradient_checkpointing": "keep only the inputs of each layer for the backward pass",
}
TINY = {"learning_rate": 3e-3, "beta2": 0.98, "warmup_steps": 0, "grad_clip": 1e9}
"""With Muon: what the tiny policies that ship were made with."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with a usage line where it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer sft",
        description="Supervised training (weighted negative log-likelihood of tokens) of a model folder on rows.",
        epilog="On several GPUs: torchrun --nproc-per-node 8 -m -- trainer sft ... It has no checkpoints: what is "
        "stopped starts again. Options without a default here have that of [train].",
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the start weights")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, action="append", help="JSON lines of `ids` and `weights`; once per phase")
    source.add_argument("--run", help="a run of the database, whose rewarded training episodes are the rows")
    parser.add_argument("--min-reward", type=_finite, help="least reward of an episode of --run (with it alone)")
    parser.add_argument("--steps", type=_positive, nargs="+", help="of each phase; default: each row once")
    parser.add_argument("--batch-size", type=_positive, default=32, help="rows of an optimizer step; default 32")
    parser.add_argument("--held-out", type=Path, help="JSON lines whose loss is measured and never learned")
    parser.add_argument("--held-out-every", type=_positive, default=50, help="in steps, and at the end; default 50")
    parser.add_argument("--seed", type=int, default=0, help="of the batches and the adapter; default 0")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon is for tiny models")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace the model that is in --out")
    weights = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=weights, help="of the written weights; default: as in --model")
    parser.add_argument("--compute-dtype", choices=weights[:2], help="of matrix products; default float32")
    for name, text in OF_TRAIN.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)
    parser.add_argument("--lora-modules", nargs="+", help="linear layers with an adapter; default attention and MLP")
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    arguments = parser.parse_args(argv)
    if (arguments.run is None) != (arguments.min_reward is None):
        parser.error("--run and --min-reward belong together")
    num_phases = 1 if arguments.rows is None else len(arguments.rows)
    if arguments.steps and len(arguments.steps) != num_phases:
        parser.error(f"{num_phases} phases of rows but {len(arguments.steps)} --steps")
    return arguments


def train_section(arguments: argparse.Namespace) -> dict[str, object]:
    """The [train] section, not validated yet."""
    adamw = {"learning_rate": 1e-5 if arguments.lora_rank is None else 1e-4, "grad_clip": 1.0}
    section: dict[str, object] = {**(TINY if arguments.optimizer == "muon" else adamw)}
    given = {name: getattr(arguments, name) for name in (*OF_TRAIN, *SWITCHES, "lora_modules")}
    given["dtype"] = arguments.compute_dtype
    return section | {name: value for name, value in given.items() if value is not None}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value
