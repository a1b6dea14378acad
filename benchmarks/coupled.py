"""The simple way to train: one process that plays a batch, waits for its last episode, trains, loads, and begins again.

No database, no broker, no queue: what is left is the engine, the handler's functions and the weights. It is what
benchmarks/async_speedup.py measures the pipeline against.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tailed_engine import NumberedTask
from benchmarks.timed_policy import TimedPolicy
from common.config import RunConfig
from common.episode import Message
from common.weights import WeightStore, version_name
from trainer.publish import version_writer
from workers.engine_client import EngineClient
from workers.render import Renderer

TIMEOUT_S = 300.0


async def train_coupled(
    config: RunConfig, policy: TimedPolicy, *, url: str, weights_dir: Path, played: Sequence[Sequence[int]]
) -> float:
    """Play and train the batches, whose tasks get a group each; returns how many seconds it took.

    Version 0 is in the engine before the clock starts, as in the other ways.
    """
    size = config.rollout.group_size
    renderer = Renderer.from_folder(config.model)
    store = WeightStore(weights_dir)
    request_ids = itertools.count()
    async with EngineClient(timeout_s=TIMEOUT_S) as client:

        async def play(number: int) -> float:
            """INIT, RUN and EVAL of one episode."""
            handler = NumberedTask()
            prepared = handler.init({"number": number})
            sampled = await client.generate(
                url,
                request_id=f"{config.name}-{next(request_ids)}",
                prompt_ids=renderer.first_prompt(prepared.messages, []),
                max_tokens=config.rollout.max_tokens_per_turn,
                temperature=config.rollout.temperature,
                stop_ids=renderer.stop_ids,
                model=None,
                run=config.name,
            )
            said = Message(role="assistant", content=renderer.decode(list(sampled.ids)))
            return handler.eval({"number": number}, (*prepared.messages, said)).reward

        async def load(version: int) -> None:
            published = await asyncio.to_thread(
                store.publish, config.name, version, version_writer(policy.model, start=config.model)
            )
            await client.pause(url)
            await client.load_version(url, published.path, version_name(config.name, version))
            await client.update_weight_version(url, version_name(config.name, version))
            await client.resume(url)

        await load(0)
        started = time.monotonic()
        for version, batch in enumerate(played):
            await asyncio.gather(*(play(number) for number in batch for _ in range(size)))
            await asyncio.to_thread(policy.train_step, [], {}, version=version)
            await load(version + 1)
        return time.monotonic() - started
