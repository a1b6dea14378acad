"""`python -m benchmarks.engine`: tokens a second of the small CPU engine, with a random model of the demo's shape."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from transformers import Qwen3Config, Qwen3ForCausalLM

CONCURRENCIES = (1, 8, 64)
PROMPT_TOKENS = (80, 220)
"""Lengths are spread evenly over this range, as over the turns of an episode."""
NEW_TOKENS = 40
VOCAB_SIZE = 576
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One concurrency's figures."""

    tokens_per_s: float
    """Sampled tokens by wall clock, the client's work on the same machine included."""
    tokens_per_cpu_s: float
    """Sampled tokens by the engine's own CPU seconds, which hold on a busy machine too."""
    median_ms: float
    """Of one request."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each concurrency is measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        results = asyncio.run(measure_all(Path(folder), seconds=arguments.seconds))
    for concurrency, found in results.items():
        print(
            f"concurrency={concurrency} tokens_per_s={found.tokens_per_s:.0f} "
            f"tokens_per_cpu_s={found.tokens_per_cpu_s:.0f} median_ms={found.median_ms:.0f}"
        )
    rates = " ".join(f"tokens_per_s_{concurrency}={found.tokens_per_s:.0f}" for concurrency, found in results.items())
    print(f"engine: {rates} tokens_per_cpu_s_{max(results)}={results[max(results)].tokens_per_cpu_s:.0f}")
    return 0


def write_model(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


async def measure_all(folder: Path, *, seconds: float) -> dict[int, Measured]:
    async with (
        running_engine(folder) as (url, pid),
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        await measure(session, pid, concurrency=8, seconds=0.5)  # so that nothing is measured for the first time
        return {
            concurrency: await measure(session, pid, concurrency=concurrency, seconds=seconds)
            for concurrency in CONCURRENCIES
        }


@asynccontextmanager
async def running_engine(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """URL and process id of an engine on a free port."""
    arguments = ("--model", str(folder), "--served-model-name", "tiny", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.engine", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), START_TIMEOUT_S)).decode()
        if "engine ready url=" not in line:
            raise SystemExit(f"the engine did not start: {line.strip()}")
        yield line.partition("url=")[2].split()[0], process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def measure(session: aiohttp.ClientSession, pid: int, *, concurrency: int, seconds: float) -> Measured:
    """Keep `concurrency` requests under way for some time; requests that start in it are finished and counted."""
    latencies_s: list[float] = []
    num_started = 0
    started, cpu_started = time.perf_counter(), cpu_seconds(pid)

    async def client() -> None:
        nonlocal num_started
        while (asked := time.perf_counter()) - started < seconds:
            num_started += 1
            await generate(session, num_started)
            latencies_s.append(time.perf_counter() - asked)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    num_tokens = NEW_TOKENS * len(latencies_s)
    return Measured(
        tokens_per_s=num_tokens / (time.perf_counter() - started),
        tokens_per_cpu_s=num_tokens / (cpu_seconds(pid) - cpu_started),
        median_ms=1000 * sorted(latencies_s)[len(latencies_s) // 2],
    )


async def generate(session: aiohttp.ClientSession, number: int) -> None:
    low, high = PROMPT_TOKENS
    length = low + number * 37 % (high - low)
    body = {
        "token_ids": [(number + 13 * position) % VOCAB_SIZE for position in range(length)],
        "sampling_params": {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0},
    }
    async with session.post("/inference/v1/generate", json=body) as answer:
        choice = (await answer.json())["choices"][0]
    assert len(choice["logprobs"]["content"]) == NEW_TOKENS, choice


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
