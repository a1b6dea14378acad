"""An engine whose context is shorter than the run needs gets no work, however it came to that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs, versions
from common.db.session import Database
from common.weight_cache import WeightCache
from common.weights import WeightStore
from tests.unit.workers.waiting import until
from tests.version_files import writing
from workers.engine_client import EngineClient
from workers.scripted_engine import ScriptedEngine
from workers.weight_keeper import WeightKeeper

WITHIN_S = 60.0
LOADS = ("/collective_rpc", "/v1/load_lora_adapter")


@pytest.fixture
async def pair() -> AsyncIterator[list[ScriptedEngine]]:
    """Two engines with the context of the tiny models."""
    async with AsyncExitStack() as stack:
        found = [ScriptedEngine(lambda prompt: [1], max_model_len=512) for _ in range(2)]
        for engine in found:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield found


def stored(database: Database, engine: ScriptedEngine) -> Row[Any]:
    with database.begin() as conn:
        return conn.execute(text("SELECT * FROM engine WHERE url = :url"), {"url": engine.url}).one()


async def until_state(database: Database, engine: ScriptedEngine, state: str, version: int | None) -> None:
    def reached() -> bool:
        row = stored(database, engine)
        return bool(row.state == state and row.version == version)

    await until(reached, within_s=WITHIN_S)


@pytest.mark.parametrize(
    ("max_row_tokens", "lora_rank", "short", "why"),
    [
        (None, None, 511, "the context of model"),
        (60, None, 59, "its rollout.max_row_tokens"),
        (60, 8, 59, "its rollout.max_row_tokens"),
    ],
)
async def test_one_that_comes_back_with_a_shorter_context_is_quarantined_and_loaded_with_nothing(
    database: Database,
    tmp_path: Path,
    pair: list[ScriptedEngine],
    max_row_tokens: int | None,
    lora_rank: int | None,
    short: int,
    why: str,
) -> None:
    config = RunConfig(
        name="run-a",
        model=TINY_MODELS / "tiny-calculator",
        rollout=RolloutConfig(max_row_tokens=max_row_tokens),
        train=TrainConfig(lora_rank=lora_rank),
    )
    store = WeightStore(tmp_path)
    published = store.publish("run-a", 0, writing("model.bin", b"w"))
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        versions.publish(conn, run.id, 0, published)
        for engine in pair:
            engines.register(conn, engine.url, run_id=run.id)
    changed, other = pair
    async with EngineClient(timeout_s=2) as client:
        keeper = WeightKeeper(database, client, owner="keeper", poll_s=0.05, cache=WeightCache(tmp_path / "cache"))
        keeping = asyncio.create_task(keeper.run())
        for engine in pair:
            await until_state(database, engine, "SERVING", 0)
        changed.max_model_len = short
        changed.calls.clear()
        await changed.restart()
        await until_state(database, changed, "QUARANTINED", None)
        await until(lambda: "context" in (stored(database, changed).error or ""), within_s=WITHIN_S)
        needed = max_row_tokens or 512
        said = f"engine {changed.url} has a context of {short} ids and the run needs {needed}, {why}"
        assert stored(database, changed).error.startswith(said)
        assert not set(LOADS) & set(changed.calls)
        await until_state(database, other, "SERVING", 0)
        changed.max_model_len = needed
        await changed.restart()
        await until_state(database, changed, "SERVING", 0)
        assert stored(database, changed).error is None
        keeping.cancel()
        await asyncio.wait([keeping])
