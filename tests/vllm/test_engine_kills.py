"""vLLM servers are killed in the middle of requests, pauses and loads; `rollmill engine serve` brings them back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from common.db.session import Database
from common.weight_cache import WeightCache
from common.weights import version_name
from tests.unit.workers.waiting import until
from tests.vllm.gate import Side
from tests.vllm.playing import Trainee, judge, playing
from tests.vllm.served import Served, serving_behind_gates
from tests.vllm.serving import RUN, START_TIMEOUT_S
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable
from workers.weight_keeper import WeightKeeper

WITHIN_S = 30.0


@pytest.fixture
def trainee(database: Database, tiny: Path, tmp_path: Path) -> Trainee:
    trainee = Trainee(database, tiny, tmp_path / "weights")
    trainee.publish_next()
    return trainee


@pytest.fixture
async def served(trainee: Trainee, database_url: str, tiny: Path, tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with serving_behind_gates(trainee, database_url, tiny, tmp_path) as found:
        yield found


async def in_the_middle_of_requests(url: str) -> None:
    """Return while several requests are being decoded there."""
    async with asyncio.timeout(WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(url + "/metrics") as answer:
                lines = (await answer.text()).splitlines()
            running = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]
            if sum(running) >= 2:
                return


async def fails_its_health_check(client: EngineClient, url: str) -> None:
    """Return when the server, which may still be there, says or shows that it can't decode."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await client.check_health(url)
            except EngineUnavailable:
                return


@pytest.mark.long
@pytest.mark.timeout(900)  # three starts of vLLM, one after the other
async def test_killed_engines_lose_no_episode(
    trainee: Trainee, served: list[Served], client: EngineClient, tmp_path: Path, figures: dict[str, object]
) -> None:
    """In mid-request, mid-pause and mid-load, whole or its engine process alone, one of them and both at once."""
    first, second = served

    def serves(one: Served) -> bool:
        return trainee.serves(one.gate.url, len(trainee.models) - 1)

    async def is_back(*those: Served) -> None:
        for one in those:
            await until(lambda one=one: serves(one), within_s=START_TIMEOUT_S)  # type: ignore[misc]
            assert await client.weight_version(one.address) == version_name(RUN, len(trainee.models) - 1)
            assert not await client.is_paused(one.address)

    async def is_gone(*those: Served) -> None:
        """The run knows that it can't have work from them."""
        for one in those:
            await until(lambda one=one: trainee.engine(one.gate.url).version is None, within_s=WITHIN_S)  # type: ignore[misc]

    with playing(trainee, tmp_path) as players:
        keeper = WeightKeeper(
            trainee.database, players.client, owner="players", poll_s=0.2, cache=WeightCache(tmp_path)
        )
        keeping = players.loop.submit(keeper.run())
        await is_back(first, second)

        await in_the_middle_of_requests(first.address)
        first.kill()
        await is_gone(first)
        await is_back(first, second)

        stop = first.gate.stop_next("/pause", Side.AFTER)
        trainee.publish_next()
        await stop.wait(within_s=WITHIN_S)
        first.kill()
        stop.release(delivers=False)
        await is_gone(first)
        await is_back(second)

        await in_the_middle_of_requests(second.address)
        os.kill(second.core(), signal.SIGKILL)
        await fails_its_health_check(client, second.address)
        await is_gone(second)
        await is_back(first, second)

        stop = second.gate.stop_next("/collective_rpc", Side.AFTER)
        trainee.publish_next()
        await stop.wait(within_s=WITHIN_S)
        second.kill()
        stop.release(delivers=False)
        await is_gone(second)
        await is_back(first, second)

        await asyncio.to_thread(players.end)
        keeping.cancel()
        verdict = judge(trainee, players)
    assert verdict.versions == set(trainee.models)
    assert verdict.engines == {one.gate.url for one in served}
    figures |= {"engine_kills": 4, "engine_kill_episodes": verdict.num_episodes}
