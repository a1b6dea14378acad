"""The scripted engine's bound on what it decodes at once."""

from __future__ import annotations

import asyncio

from common.weights import version_name
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_pressure import Pressure, parse_pressure
from workers.scripted_engine import ScriptedEngine


async def test_requests_beyond_the_bound_wait_and_are_counted() -> None:
    engine = ScriptedEngine(lambda prompt: [5, 6], max_running=1)
    engine.version = version_name("run-a", 3)
    engine.pause()
    await engine.start()
    async with EngineClient(timeout_s=10) as client:
        asked = [
            asyncio.create_task(
                client.generate(
                    engine.url,
                    request_id=str(number),
                    prompt_ids=[1],
                    max_tokens=8,
                    temperature=1.0,
                    stop_ids=[6],
                    model=None,
                    run="run-a",
                )
            )
            for number in range(3)
        ]
        await until(lambda: len(engine.open) == 3)
        found = parse_pressure(await client.metrics(engine.url))
        assert found == Pressure(num_waiting=2, num_running=1, kv_usage=0, num_preemptions=0)
        engine.resume()
        assert [sampled.ids for sampled in await asyncio.gather(*asked)] == [(5, 6)] * 3
        found = parse_pressure(await client.metrics(engine.url))
        assert found == Pressure(num_waiting=0, num_running=0, kv_usage=0, num_preemptions=0)
    await engine.stop()
