"""`python -m benchmarks.delta_weights`: what a version would weigh as a difference to the one before it.

A Qwen3-shaped model with random weights of std 0.02 (the scale of the published ones) and float32 master weights takes
some AdamW steps, so that its moments are those of a run and not of a first step; the next step is measured. The loss is
REINFORCE on random ids with random advantages: AdamW's step does not depend on the gradient's scale, and hardly on
what is learned. No model that was really trained is used: none is here.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 8192
BATCH = (2, 96)
"""Rows and tokens of a step."""
BETAS = (0.9, 0.99)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Raw = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step in one published dtype. Sizes are fractions of the whole file."""

    changed_fraction: float
    """Of the values; bit for bit."""
    changed_tensors: float
    """Size of the tensors in which any value changed."""
    indexed: float
    """Size of the changed values with the gaps between them, as bytes (a long gap takes several), deflated."""
    xored: float
    """Size of old xor new, deflated, the bytes of equal significance side by side."""
    encode_s_per_gb: float
    """CPU seconds to make `indexed`, per GB of the whole file."""
    decode_s_per_gb: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta_weights", description=__doc__)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--warm-up-steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"betas={BETAS} warm_up_steps={arguments.warm_up_steps} batch={BATCH[0]}x{BATCH[1]} weight_std=0.02")
    summary = []
    for rate in arguments.learning_rates:
        before, after = one_step(rate, warm_up_steps=arguments.warm_up_steps)
        for name, dtype in DTYPES.items():
            found = measure(before, after, dtype)
            print(
                f"learning_rate={rate:g} dtype={name} changed={found.changed_fraction:.2%} "
                f"changed_tensors={found.changed_tensors:.3f} indexed={found.indexed:.3f} xored={found.xored:.3f} "
                f"encode_s_per_gb={found.encode_s_per_gb:.1f} decode_s_per_gb={found.decode_s_per_gb:.1f}"
            )
            summary.append(f"{name}_{rate:g}={min(found.indexed, found.xored):.3f}")
    num_parameters = sum(tensor.numel() for tensor in before.values())
    print(f"delta_weights: parameters={num_parameters} smallest_as_fraction_of_whole: {' '.join(summary)}")
    return 0


def one_step(learning_rate: float, *, warm_up_steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """float32 master weights before and after a step."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
    for _ in range(warm_up_steps):
        _update(model, optimizer)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    _update(model, optimizer)
    return before, {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def _update(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer) -> None:
    ids_BL = torch.randint(0, VOCAB_SIZE, BATCH)
    advantages_B1 = torch.randn(BATCH[0], 1)
    logits_BLV = model(input_ids=ids_BL).logits[:, :-1].float()
    logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantages_B1 * logprobs_BL).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    optimizer.step()


def measure(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Measured:
    """Of two sets of master weights, both published as `dtype`."""
    num_values = num_changed = num_bytes = bytes_of_changed = indexed = xored = 0
    encode_s = decode_s = 0.0
    for name, tensor in after.items():
        old_N, new_N = _raw(before[name].to(dtype)), _raw(tensor.to(dtype))
        changed = int((old_N != new_N).sum())
        num_values += old_N.size
        num_changed += changed
        num_bytes += old_N.nbytes
        bytes_of_changed += old_N.nbytes if changed else 0
        started = time.process_time()
        delta = encode(old_N, new_N)
        encoded = time.process_time()
        decoded_N = decode(old_N, delta)
        decode_s += time.process_time() - encoded
        encode_s += encoded - started
        assert (decoded_N == new_N).all(), f"{name} is not what it was"
        indexed += sum(len(part) for part in delta)
        planes = (old_N ^ new_N).view(np.uint8).reshape(old_N.size, old_N.itemsize).T
        xored += len(zlib.compress(planes.tobytes(), 1))
    return Measured(
        changed_fraction=num_changed / num_values,
        changed_tensors=bytes_of_changed / num_bytes,
        indexed=indexed / num_bytes,
        xored=xored / num_bytes,
        encode_s_per_gb=encode_s / num_bytes * 1e9,
        decode_s_per_gb=decode_s / num_bytes * 1e9,
    )


def encode(old_N: Raw, new_N: Raw) -> tuple[bytes, bytes]:
    """Gaps between the changed values (255 = add 255 and go on), and old xor new of each; both deflated."""
    places = np.flatnonzero(old_N != new_N)
    gaps = np.diff(places, prepend=-1) - 1
    longs, rests = gaps // 255, (gaps % 255).astype(np.uint8)
    stream = np.full(int(longs.sum()) + len(gaps), 255, np.uint8)
    stream[np.cumsum(longs + 1) - 1] = rests
    flips = (old_N[places] ^ new_N[places]).view(np.uint8).reshape(len(places), old_N.itemsize).T
    return zlib.compress(stream.tobytes(), 1), zlib.compress(flips.tobytes(), 1)


def decode(old_N: Raw, delta: tuple[bytes, bytes]) -> Raw:
    """The inverse of `encode`."""
    stream = np.frombuffer(zlib.decompress(delta[0]), np.uint8)
    ends = np.flatnonzero(stream != 255)
    totals = np.cumsum(stream, dtype=np.int64)[ends]
    places = totals + np.arange(len(ends))
    flips = np.frombuffer(zlib.decompress(delta[1]), np.uint8).reshape(old_N.itemsize, len(places)).T
    new_N = old_N.copy()
    new_N[places] ^= np.ascontiguousarray(flips).view(old_N.dtype)[:, 0]
    return new_N


def _raw(tensor: torch.Tensor) -> Raw:
    as_int = tensor.flatten().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)
    return as_int.numpy().view(np.uint16 if tensor.dtype is torch.bfloat16 else np.uint32)


if __name__ == "__main__":
    sys.exit(main())
