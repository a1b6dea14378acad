"""Scripted engines and a pool over them, for the tests of the choice between engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from common.config import EvalConfig, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, Sampled
from tests import claims
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_list import CACHE_S
from workers.engine_pool import EnginePool
from workers.scripted_engine import ScriptedEngine

GENERATE = "/inference/v1/generate"
ALPHABET = list(range(10, 30))
"""What the scripted policy writes after any prompt of one id; a longer prompt is continued from where it stands."""


def go_on(prompt: list[int]) -> list[int]:
    return ALPHABET[len(prompt) - 1 :]


class Fleet:
    """Engines, their rows, and a pool over them."""

    def __init__(self, client: EngineClient, engines: list[ScriptedEngine], *, max_in_flight: int = 1024) -> None:
        self.engines = engines
        self.rows = [row(number, engine.url) for number, engine in enumerate(engines)]
        self.num_reads = 0
        self.failing: Callable[[int], list[EngineRow]] | None = None
        """Is called instead of reading; None = reading works."""
        self.pool = EnginePool(client, self.read, wait_s=5, max_in_flight=max_in_flight)

    def read(self, run_id: int) -> list[EngineRow]:
        self.num_reads += 1
        if self.failing is not None:
            return self.failing(run_id)
        return [row for row in self.rows if row.run_id == run_id]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    async def turn(self, *, episode: int = 1, group: int = 1, max_tokens: int = 3) -> tuple[Sampled, str]:
        claim = make_claim(episode=episode, group=group, max_tokens=max_tokens)
        generated = await self.pool.generate(claim, [1], request_id=uuid4().hex, stop_ids=(29,))
        return generated.sampled, generated.engine


@asynccontextmanager
async def running_fleet(num_engines: int = 2, *, max_in_flight: int = 1024) -> AsyncIterator[Fleet]:
    """Engines that serve version 3 of run-a."""
    engines = [ScriptedEngine(go_on) for _ in range(num_engines)]
    for engine in engines:
        engine.version = "run-a/000003"
        await engine.start()
    try:
        async with EngineClient(timeout_s=5) as client:
            yield Fleet(client, engines, max_in_flight=max_in_flight)
    finally:
        for engine in engines:
            await engine.stop()


def row(number: int, url: str, *, version: int | None = 3, state: EngineState = EngineState.SERVING) -> EngineRow:
    return EngineRow(id=number, url=url, run_id=5, state=state, version=version)


def make_claim(*, episode: int = 1, group: int = 1, max_tokens: int = 3, eval_version: int | None = None) -> Claim:
    config = RunConfig(
        name="run-a",
        model=Path("model"),
        rollout=RolloutConfig(max_tokens_per_turn=max_tokens),
        train=TrainConfig(max_staleness=1),
        eval=EvalConfig(),
    )
    return claims.make_claim(config, episode=episode, group=group, run_id=5, eval_version=eval_version)


async def until_a_reading_is_old() -> None:
    """What the pool knows of the engines' rows is read anew by the next turn."""
    due = time.monotonic() + CACHE_S + 0.01
    await until(lambda: time.monotonic() >= due)
