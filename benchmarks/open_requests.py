"""`python -m benchmarks.open_requests`: what a RUN process pays for thousands of requests that are open at once.

CPU time and memory a request at 500 to 5,000 open ones, through the client alone and through the engine pool, and for
16,000 turns that wait in the pool for 500 places. The engine is a stub in its own process. Exit code 1 when a request
among many costs more than the bound times what it costs among few. Last line: figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import aiohttp

from common.config import RolloutConfig, RunConfig
from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, Stage
from common.errors import SetupError
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.open_files import raise_open_files

OPEN = (500, 1000, 2500, 5000)
QUEUED = (2000, 16_000)
PLACES = 500
PROMPT_TOKENS = 500
MAX_GROWTH = 1.5
"""A request's CPU time at the largest number, by that at the smallest, with ten times (queued: eight) as many.

1 is linear, 10 quadratic. Client and pool exceed it so far: what grows is not known yet.
"""
MAX_KIB = 150.0
"""Memory of an open request, its prompt included."""
TIMEOUT_S = 300.0
RUN = "open-requests"
CONFIG = RunConfig(name=RUN, model=Path("model"), rollout=RolloutConfig(max_tokens_per_turn=64))
SPARE_FILES = 512

Send = Callable[[int], Awaitable[object]]
"""Sends one request, given its number."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """So many requests at once."""

    num: int
    cpu_ms: float
    """Of this process, for each request."""
    kib: float
    """Resident memory while all are open, for each request, beyond that of the process before its first one."""
    max_open: int
    """At once in the engine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_requests", description=__doc__)
    parser.add_argument("--way", choices=("client", "pool", "queued"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        raise_open_files(max(OPEN) + SPARE_FILES)
    except SetupError as error:
        print(f"open_requests: {error}", file=sys.stderr)
        return 2
    if arguments.way:
        found = asyncio.run(measure_way(arguments.way, arguments.url))
        print(json.dumps([asdict(one) for one in found]))
        return 0
    with stub_engine() as url:
        results = {way: in_own_process(way, url) for way in ("client", "pool", "queued")}
    return report(results)


@contextmanager
def stub_engine() -> Iterator[str]:
    """URL of the engine; its process ends with the block."""
    argv = [sys.executable, "-m", "benchmarks.stub_engine", str(max(OPEN) + SPARE_FILES)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("http"):
            raise SystemExit("the stub engine did not start")
        yield line
        process.communicate()


def in_own_process(way: str, url: str) -> list[Measured]:
    """Memory that one way has used and given back would hide what the next one needs."""
    argv = [sys.executable, "-m", "benchmarks.open_requests", "--way", way, "--url", url]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=2 * TIMEOUT_S, check=True)
    found = [Measured(**one) for one in json.loads(done.stdout)]
    for one in found:
        print(f"{way} num={one.num} cpu_ms={one.cpu_ms:.3f} kib={one.kib:.1f} max_open={one.max_open}", flush=True)
    return found


async def measure_way(way: str, url: str) -> list[Measured]:
    numbers = QUEUED if way == "queued" else OPEN
    row = EngineRow(id=1, url=url, run_id=1, state=EngineState.SERVING, version=0)
    max_in_flight = PLACES if way == "queued" else max(OPEN)
    async with EngineClient(timeout_s=TIMEOUT_S) as client, aiohttp.ClientSession(url) as control:
        pool = EnginePool(client, lambda run_id: [row], wait_s=TIMEOUT_S, max_in_flight=max_in_flight)
        send = partial(through_client, client, url) if way == "client" else partial(through_pool, pool)
        watch = asyncio.create_task(pool.watch_pressure(every_s=0.1))
        await measure(send, control, num=50, hold=False)  # so that nothing is done for the first time
        before = resident_bytes()
        found = []
        for num in numbers:
            rounds = []
            # As many requests for each number, or the garbage collector's rare large rounds would meet the last alone.
            for _ in range(max(numbers) // num):
                await client.close()  # Connections of the round before would make this one cheaper.
                rounds.append(await measure(send, control, num=num, hold=way != "queued"))
            cpu_s, resident, max_open = zip(*rounds, strict=True)
            found.append(
                Measured(
                    num=num,
                    cpu_ms=1000 * sum(cpu_s) / len(rounds) / num,
                    kib=(max(resident) - before) / num / 1024,
                    max_open=max(max_open),
                )
            )
        watch.cancel()
    return found


async def through_client(client: EngineClient, url: str, number: int) -> object:
    return await client.generate(
        url,
        request_id=uuid4().hex,
        prompt_ids=prompt(number),
        max_tokens=64,
        temperature=1.0,
        stop_ids=(2,),
        model=None,
        run=RUN,
    )


async def through_pool(pool: EnginePool, number: int) -> object:
    return await pool.generate(claim(number), prompt(number), request_id=uuid4().hex, stop_ids=(2,))


def prompt(number: int) -> list[int]:
    """Ids as large as real ones, so that they take memory as real ones do."""
    return [1000 + number + position for position in range(PROMPT_TOKENS)]


def claim(number: int) -> Claim:
    return Claim(
        stage=Stage.RUN,
        episode_id=number,
        attempt=1,
        token=uuid4(),
        worker="benchmark",
        group_id=number // 8,
        run_id=1,
        config=CONFIG,
        handler="calculator",
        payload={},
        prepared=None,
        num_turns=0,
        outcome=None,
        transcript=[],
    )


async def measure(send: Send, control: aiohttp.ClientSession, *, num: int, hold: bool) -> tuple[float, int, int]:
    """CPU seconds, resident bytes while all are asked for and none is answered, and the most at once in the engine.

    Without `hold` the engine answers each after a moment; the memory is that right after all have been asked for.
    """
    gc.collect()
    async with control.post("/start", params={"hold": int(hold)}):
        pass
    started = time.process_time()
    tasks = [asyncio.create_task(send(number)) for number in range(num)]
    await asyncio.sleep(0)
    async with asyncio.timeout(TIMEOUT_S):
        while hold and (await ask(control))["open"] < num:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
        resident = resident_bytes()
        async with control.post("/release"):
            pass
        await asyncio.gather(*tasks)
    cpu_s = time.process_time() - started
    return cpu_s, resident, (await ask(control))["max_open"]


async def ask(control: aiohttp.ClientSession) -> dict[str, int]:
    async with control.get("/open") as answer:
        found: dict[str, int] = await answer.json()
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(results: dict[str, list[Measured]]) -> int:
    """Print the figures; 1 when one is beyond its bound."""
    figures, failures = [], []
    for way, found in results.items():
        few, many = found[0], found[-1]
        growth = many.cpu_ms / few.cpu_ms
        figures.append(f"{way}_{many.num}_cpu_ms={many.cpu_ms:.3f} {way}_growth={growth:.2f} {way}_kib={many.kib:.1f}")
        if growth > MAX_GROWTH:
            failures.append(f"{way}: a request among {many.num} costs {growth:.2f} times one among {few.num}")
        if many.kib > MAX_KIB:
            failures.append(f"{way}: {many.kib:.1f} KiB for each of {many.num} requests, at most {MAX_KIB:g} expected")
        expected = range(PLACES // 2, PLACES + 1) if way == "queued" else [many.num]
        if many.max_open not in expected:
            failures.append(f"{way}: {many.max_open} requests were open at once, expected {expected}")
    for failure in failures:
        print(f"open_requests: {failure}", file=sys.stderr)
    print("open_requests: " + " ".join(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
