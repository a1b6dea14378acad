"""`python -m benchmarks.train_step`: tokens per second, MFU and peak memory of a training step; the last line has them.

The step is Policy.train_step on made-up rows of uneven length: the probe, one pass forward and back for each
micro-batch, one update. On a GPU a Qwen3 of about half a billion parameters in bfloat16 over 16,384 tokens; on a CPU a
tiny one in float32, whose times are of the processor and not of the clock. Padded and packed, with all logits at once
and in chunks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.live_bytes import LiveBytes
from common.config_train import TrainConfig
from trainer.policy import Policy
from trainer.samples import Sample

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16, by what the device's name contains."""
ALL_LOGITS = 2**62
WAYS: dict[str, dict[str, object]] = {
    "padded": {"packing": False, "max_logits": ALL_LOGITS},
    "padded chunked": {"packing": False},
    "packed": {"packing": True, "max_logits": ALL_LOGITS},
    "packed chunked": {"packing": True},
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the tokens of a step."""

    model: Qwen3Config
    num_tokens: int
    """Positions of all rows; also the budget of a pass."""
    longest: int
    train: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way over all repeats."""

    tokens_per_s: list[float]
    peak_bytes: int
    mfu: float | None
    """Share of the device's peak; None where that is not known."""


def gpu_shape() -> Shape:
    """Qwen3-0.6B with fewer layers: 0.5 B parameters."""
    model = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
    )
    train: dict[str, object] = {"dtype": "bfloat16", "gradient_checkpointing": True, "max_logits": 2**28}
    return Shape(model=model, num_tokens=16384, longest=4096, train=train)


def cpu_shape() -> Shape:
    """A tiny one whose vocabulary is as large beside its layers as a real one's."""
    model = Qwen3Config(
        vocab_size=8192,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        tie_word_embeddings=True,
    )
    return Shape(model=model, num_tokens=2048, longest=512, train={"max_logits": 2**20})


def make_rows(shape: Shape) -> list[Sample]:
    """Rows of exactly the step's tokens, many short and few long; the last three quarters are sampled."""
    rng = np.random.default_rng(0)
    rows: list[Sample] = []
    left = shape.num_tokens
    while left:
        length = min(int(rng.lognormal(np.log(shape.longest / 8), 1.0)) + 4, shape.longest, left)
        mask_L = np.arange(length) >= max(length // 4, 1)
        rows.append(
            Sample(
                episode_id=len(rows),
                group_id=len(rows) // 4,
                index=0,
                ids_L=rng.integers(0, shape.model.vocab_size, length, dtype=np.int32),
                mask_L=mask_L,
                behaviour_logprobs_L=np.where(mask_L, -np.log(shape.model.vocab_size), 0).astype(np.float32),
                versions_L=np.where(mask_L, 0, -1).astype(np.int32),
            )
        )
        left -= length
    return rows


def measure(shape: Shape, rows: Sequence[Sample], way: dict[str, object], *, repeats: int) -> Measured:
    """One step to warm up and for the memory, then `repeats` for the time."""
    train = TrainConfig.model_validate({"minibatches": 1, "max_positions": shape.num_tokens} | shape.train | way)
    torch.manual_seed(0)
    policy = Policy(Qwen3ForCausalLM(shape.model), train=train, temperature=1.0, seed=0)
    device = policy.ranks.device
    advantages = {row.episode_id: 1.0 if row.episode_id % 2 else -1.0 for row in rows}
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with LiveBytes() as memory:
        policy.train_step(rows, advantages, version=0)
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else memory.peak
    clock = time.perf_counter if on_gpu else time.process_time
    rates = []
    for version in range(1, repeats + 1):
        started = clock()
        policy.train_step(rows, advantages, version=version)
        rates.append(shape.num_tokens / (clock() - started))
    peak = next((flops for name, flops in PEAK_FLOPS.items() if on_gpu and name in torch.cuda.get_device_name()), None)
    mfu = None if peak is None else statistics.median(rates) * flops_per_token(policy, rows) / peak
    return Measured(tokens_per_s=rates, peak_bytes=peak_bytes, mfu=mfu)


def flops_per_token(policy: Policy, rows: Sequence[Sample]) -> float:
    """Of forward and backward, as the model needs them: nothing for what is computed twice, for padding, for the probe.

    Six for each parameter (Kaplan et al. 2020, "Scaling laws for neural language models", section 2.1), and for causal
    attention six for each layer, channel and position that a token sees.
    """
    config = policy.model.config
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    seen = sum(len(row.ids_L) ** 2 for row in rows) / sum(len(row.ids_L) for row in rows)
    attention: float = config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen
    return 6 * parameters + 6 * attention


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each way, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each way")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    shape = gpu_shape() if on_gpu else cpu_shape()
    rows = make_rows(shape)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    print(f"device={name!r} rows={len(rows)} tokens={shape.num_tokens} vocabulary={shape.model.vocab_size}")
    figures = []
    for way, train in WAYS.items():
        found = measure(shape, rows, train, repeats=options.repeats)
        mfu = "n/a" if found.mfu is None else f"{found.mfu:.3f}"
        low, high = min(found.tokens_per_s), max(found.tokens_per_s)
        middle, peak_mb = statistics.median(found.tokens_per_s), found.peak_bytes / 1e6
        print(f"{way}: tokens_per_s={middle:.0f} ({low:.0f} to {high:.0f}) mfu={mfu} peak_mb={peak_mb:.0f}", flush=True)
        label = way.replace(" ", "_")
        figures.append(f"{label}_tokens_per_s={middle:.0f} {label}_mfu={mfu} {label}_peak_mb={peak_mb:.0f}")
    print(f"train_step: device={name!r} {' '.join(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
