"""`python -m benchmarks.open_requests`: what a RUN process pays for thousands of requests that are open at once.

CPU time and memory a request at 500 to 5,000 open ones, through the client alone and through the engine pool: all begun
at once, and through the pool each begun when another ends (steady). The same for 16,000 turns that wait in the pool for
500 places. The engine is a stub in its own process. Exit code 1 when a request among many costs more than the bound
times what it costs among few. Last line: figures.
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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import aiohttp

from common.config import RolloutConfig, RunConfig
from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, Stage
from common.errors import EpisodeError, SetupError
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable
from workers.engine_http import EngineHttp
from workers.engine_pool import EnginePool
from workers.garbage import collect_seldom
from workers.open_files import raise_open_files

OPEN = (500, 1000, 2500, 5000)
QUEUED = (2000, 16_000)
PLACES = 500
PROMPT_TOKENS = 500
MAX_GROWTH = 1.5
"""A request's CPU time at the largest number, by that at the smallest, with ten times (queued: eight) as many.

1 is linear, 10 quadratic. The garbage collector counts, as rare as a RUN process has made it (`workers.garbage`).
"""
MAX_KIB = 150.0
"""Memory of an open request, its prompt included."""
TIMEOUT_S = 300.0
RUN = "open-requests"
CONFIG = RunConfig(name=RUN, model=Path("model"), rollout=RolloutConfig(max_tokens_per_turn=64))
SPARE_FILES = 512
WAYS = ("client", "pool", "steady", "queued")
TURNED_OVER = 10_000
"""Requests that the steady way counts, at each number of open ones."""
TURNED_AT_ONCE = 50
"""Of them under way beside those that the engine holds."""

Send = Callable[[int], Coroutine[Any, Any, object]]
"""Sends one request, given its number."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What was seen once."""

    num_counted: int
    """Requests to which the times belong."""
    cpu_s: float
    gc_s: float
    """Part of it."""
    resident: int
    """Bytes while all are open, or have been asked for."""
    max_open: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """So many requests at once."""

    num: int
    cpu_ms: float
    """Of this process, for each request."""
    gc_ms: float
    """The garbage collector's part of it."""
    kib: float
    """Resident memory while all are open, for each request, beyond that of the process before its first one."""
    max_open: int
    """At once in the engine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.open_requests", description=__doc__)
    parser.add_argument("--often", action="store_true", help="leave the garbage collector as Python starts it")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        raise_open_files(max(OPEN) + SPARE_FILES)
        if arguments.way:
            found = run_way(arguments.way, arguments.url, often=arguments.often)
            print(json.dumps([asdict(one) for one in found]))
            return 0
        with stub_engine() as url:
            results = {way: in_own_process(way, url, often=arguments.often) for way in WAYS}
    except SetupError as error:
        print(f"open_requests: {error}", file=sys.stderr)
        return 2
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


def in_own_process(way: str, url: str, *, often: bool) -> list[Measured]:
    """Memory that one way has used and given back would hide what the next one needs."""
    argv = [sys.executable, "-m", "benchmarks.open_requests", "--way", way, "--url", url, *(["--often"] * often)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=2 * TIMEOUT_S, check=False)
    if done.returncode:
        raise SetupError(f"the way {way} ended with {done.returncode}, see above")
    found = [Measured(**one) for one in json.loads(done.stdout)]
    for one in found:
        print(
            f"{way} num={one.num} cpu_ms={one.cpu_ms:.3f} gc_ms={one.gc_ms:.3f} kib={one.kib:.1f}"
            f" max_open={one.max_open}",
            flush=True,
        )
    return found


def run_way(way: str, url: str, *, often: bool) -> list[Measured]:
    """Raises SetupError when a request fails: the system has no more ports, for example."""
    try:
        return asyncio.run(measure_way(way, url, often=often))
    except* (EngineUnavailable, EpisodeError) as errors:
        raise SetupError(f"a request failed: {errors.exceptions[0]}") from errors


async def measure_way(way: str, url: str, *, often: bool) -> list[Measured]:
    numbers = QUEUED if way == "queued" else OPEN
    row = EngineRow(id=1, url=url, run_id=1, state=EngineState.SERVING, version=0)
    max_in_flight = PLACES if way == "queued" else max(OPEN) + TURNED_AT_ONCE
    # On a busy machine connections are late, too; what they take is in the figures.
    http = EngineHttp(connect_timeout_s=TIMEOUT_S)
    async with EngineClient(timeout_s=TIMEOUT_S, http=http) as client, aiohttp.ClientSession(url) as control:
        pool = EnginePool(client, lambda run_id: [row], wait_s=TIMEOUT_S, max_in_flight=max_in_flight)
        send = partial(through_client, client, url) if way == "client" else partial(through_pool, pool)
        watch = asyncio.create_task(pool.watch_pressure(every_s=0.1))
        await measure(send, control, num=50, hold=False)  # so that nothing is done for the first time
        if not often:
            collect_seldom()
        before = resident_bytes()
        found = []
        for num in numbers:
            rounds = []
            # As many requests for each number, or the garbage collector's rare large rounds would meet the last alone.
            for _ in range(1 if way == "steady" else max(numbers) // num):
                await client.close()  # Connections of the round before would make this one cheaper.
                if way == "steady":
                    rounds.append(await measure_steady(send, control, num=num))
                else:
                    rounds.append(await measure(send, control, num=num, hold=way != "queued"))
            found.append(summed_up(num, rounds, before))
        watch.cancel()
    return found


def summed_up(num: int, rounds: list[Round], before: int) -> Measured:
    """All rounds with so many requests as one; `before` = resident bytes before the first one."""
    num_counted = sum(one.num_counted for one in rounds)
    return Measured(
        num=num,
        cpu_ms=1000 * sum(one.cpu_s for one in rounds) / num_counted,
        gc_ms=1000 * sum(one.gc_s for one in rounds) / num_counted,
        kib=(max(one.resident for one in rounds) - before) / num / 1024,
        max_open=max(one.max_open for one in rounds),
    )


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


async def measure(send: Send, control: aiohttp.ClientSession, *, num: int, hold: bool) -> Round:
    """Requests that are all asked for before one is answered.

    Without `hold` the engine answers each after a moment; the memory is that right after all have been asked for.
    """
    gc.collect()
    await tell(control, "/start", hold=num if hold else 0)
    with CollectorTime() as collector:
        started = time.process_time()
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for number in range(num):
                tasks.create_task(send(number))
            await asyncio.sleep(0)
            await wait_until_open(control, num if hold else 0)
            resident = resident_bytes()
            await tell(control, "/release")
        cpu_s = time.process_time() - started
    max_open = (await ask(control))["max_open"]
    return Round(num_counted=num, cpu_s=cpu_s, gc_s=collector.spent_s, resident=resident, max_open=max_open)


async def measure_steady(send: Send, control: aiohttp.ClientSession, *, num: int) -> Round:
    """Requests of which each begins when another ends, while `num` are open; that those begin is not counted.

    The garbage collector's rounds come as they come, large ones too.
    """
    gc.collect()
    await tell(control, "/start", hold=num)
    ended = asyncio.Semaphore(TURNED_AT_ONCE)

    async def send_one(number: int) -> None:
        await send(number)
        ended.release()

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for number in range(num):
            tasks.create_task(send_one(number))
        await wait_until_open(control, num)
        with CollectorTime() as collector:
            started = time.process_time()
            for number in range(num, num + TURNED_OVER):
                await ended.acquire()
                tasks.create_task(send_one(number))
            cpu_s = time.process_time() - started
        resident = resident_bytes()
        await wait_until_open(control, num)
        await tell(control, "/release")
    max_open = (await ask(control))["max_open"]
    return Round(num_counted=TURNED_OVER, cpu_s=cpu_s, gc_s=collector.spent_s, resident=resident, max_open=max_open)


async def wait_until_open(control: aiohttp.ClientSession, num: int) -> None:
    while (await ask(control))["open"] < num:  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(0.05)


async def tell(control: aiohttp.ClientSession, path: str, **params: int) -> None:
    async with control.post(path, params=params):
        pass


async def ask(control: aiohttp.ClientSession) -> dict[str, int]:
    async with control.get("/open") as answer:
        found: dict[str, int] = await answer.json()
    return found


class CollectorTime:
    """CPU time of the garbage collector's rounds within the block."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._started = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.process_time()
        else:
            self.spent_s += time.process_time() - self._started


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(results: dict[str, list[Measured]]) -> int:
    """Print the figures; 1 when one is beyond its bound."""
    figures, failures = [], []
    for way, found in results.items():
        few, many = found[0], found[-1]
        growth = many.cpu_ms / few.cpu_ms
        figures.append(
            f"{way}_{many.num}_cpu_ms={many.cpu_ms:.3f} {way}_growth={growth:.2f} {way}_gc_ms={many.gc_ms:.3f}"
            f" {way}_kib={many.kib:.1f}"
        )
        if growth > MAX_GROWTH:
            failures.append(f"{way}: a request among {many.num} costs {growth:.2f} times one among {few.num}")
        if many.kib > MAX_KIB:
            failures.append(f"{way}: {many.kib:.1f} KiB for each of {many.num} requests, at most {MAX_KIB:g} expected")
        fewest = PLACES // 2 if way == "queued" else many.num
        most = {"queued": PLACES, "steady": many.num + TURNED_AT_ONCE}.get(way, many.num)
        if not fewest <= many.max_open <= most:
            failures.append(f"{way}: {many.max_open} requests were open at once, expected {fewest} to {most}")
    for failure in failures:
        print(f"open_requests: {failure}", file=sys.stderr)
    print("open_requests: " + " ".join(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
