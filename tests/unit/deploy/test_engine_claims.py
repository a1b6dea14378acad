"""An engine that another run uses is not for the taking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.errors import SetupError
from common.weights import LOADING, version_name
from deploy.engine_claims import check_unclaimed
from workers.scripted_engine import ScriptedEngine


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(reply=lambda _: [1])
    await engine.start()
    yield engine
    await engine.stop()


async def check(engine: ScriptedEngine, *, holder: str | None = None) -> None:
    await asyncio.to_thread(check_unclaimed, engine.url, run="mine", holder=holder)


@pytest.mark.parametrize("version", ["default", "Qwen/Qwen3-4B", version_name("mine", 3)])
async def test_start_weights_and_the_runs_own_are_free(engine: ScriptedEngine, version: str) -> None:
    engine.version = version
    engine.adapters = {version_name("mine", 2): "/folder"}
    await check(engine)
    await check(engine, holder="mine")


async def test_weights_and_adapters_of_another_run_are_not(engine: ScriptedEngine) -> None:
    engine.adapters = {version_name("mine", 2): "/folder", version_name("theirs", 4): "/folder"}
    with pytest.raises(SetupError, match=f"{engine.url} holds adapter theirs/000004, of another run than mine: remove"):
        await check(engine)
    engine.version = version_name("theirs", 5)
    with pytest.raises(SetupError, match="serves theirs/000005, of another run than mine"):
        await check(engine, holder="mine")
    with pytest.raises(SetupError, match="serves run theirs of this database, which is not over"):
        await check(engine, holder="theirs")


async def test_weights_that_are_being_exchanged_are_free_only_for_the_run_that_has_the_engine(
    engine: ScriptedEngine,
) -> None:
    engine.version = LOADING
    with pytest.raises(SetupError, match="is loading weights for some run: remove it there first"):
        await check(engine)
    await check(engine, holder="mine")
