"""Engines, their engine process alone, and keepers are killed while an engine exchanges its tensors."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.db import engines
from common.db.session import Database
from common.weight_cache import WeightCache
from common.weights import version_name
from tests.unit.workers.waiting import until
from tests.vllm.gate import Gate
from tests.vllm.lone_keeper import keepers
from tests.vllm.playing import Trainee, judge, playing
from tests.vllm.served import Served, serving_behind_gates
from tests.vllm.serving import RUN, START_TIMEOUT_S, serving
from workers.engine_client import EngineClient
from workers.weight_keeper import WeightKeeper

NUM_LAYERS = 96
"""So that an exchange takes long enough to be hit, though the model is small."""
NUM_ROUNDS = 4
"""Of engines; each starts both anew. `engine serve` gives up after five ends in a row."""
NUM_KEEPERS = 10
WITHIN_S = 60.0
FIRST_PART = 0.7
"""Of an exchange's usual time, in which the kill falls."""


@pytest.fixture(scope="module")
def deep(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with many tensors."""
    folder = tmp_path_factory.mktemp("deep")
    config = AutoConfig.from_pretrained(tiny)
    config.num_hidden_layers = NUM_LAYERS
    config.layer_types = config.layer_types[:1] * NUM_LAYERS
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in tiny.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


class Loads:
    """What an engine's log says of its loads."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self.usual_s = 0.0
        """How long the exchange of the first load took, seen from here."""

    def has_begun(self, number: int) -> bool:
        """Whether the exchange of this version's tensors has begun."""
        return any(
            "exchanging weights" in line and line.rstrip().endswith(version_name(RUN, number)) for line in self._lines()
        )

    def has_ended(self, number: int) -> bool:
        return any(f"weights loaded version={version_name(RUN, number)}" in line for line in self._lines())

    async def time_one(self, number: int) -> None:
        """Note how long the exchange takes that is about to begin."""
        await _until(lambda: self.has_begun(number))
        started = time.monotonic()
        await _until(lambda: self.has_ended(number))
        self.usual_s = time.monotonic() - started

    async def kill_within(self, number: int, kill: Callable[[], None], *, part: float) -> bool:
        """Kill when this part of the usual time has passed since the exchange began; whether it had not ended."""
        await _until(lambda: self.has_begun(number))
        due = time.monotonic() + part * self.usual_s
        await _until(lambda: time.monotonic() >= due)
        kill()
        return not self.has_ended(number)

    def _lines(self) -> list[str]:
        return self._log_file.read_text(errors="replace").splitlines()


async def _until(reached: Callable[[], bool]) -> None:
    await until(reached, within_s=START_TIMEOUT_S)


@pytest.mark.long
@pytest.mark.timeout(1200)  # five starts of two engines each
async def test_engines_killed_in_the_middle_of_a_load_serve_no_half_of_it(
    database: Database,
    database_url: str,
    deep: Path,
    client: EngineClient,
    tmp_path: Path,
    figures: dict[str, object],
) -> None:
    """One whole and the other's engine process alone, in turns. Each gets the newest version before it serves."""
    chance = random.Random(4)
    trainee = Trainee(database, deep, tmp_path / "weights")
    trainee.publish_next()

    async def are_back(served: list[Served], number: int) -> None:
        for one in served:
            await _until(lambda one=one: trainee.serves(one.gate.url, number))  # type: ignore[misc]
            assert await client.weight_version(one.address) == version_name(RUN, number)
            assert not await client.is_paused(one.address)

    async with serving_behind_gates(trainee, database_url, deep, tmp_path) as served:
        loads = [Loads(one.log_file) for one in served]
        with playing(trainee, tmp_path) as players:
            cache = WeightCache(tmp_path)
            keeper = WeightKeeper(database, players.client, owner="players", poll_s=0.2, cache=cache)
            keeping = players.loop.submit(keeper.run())
            await asyncio.gather(*(load.time_one(0) for load in loads))
            await are_back(served, 0)
            hits = 0
            for round_number in range(NUM_ROUNDS):
                whole, half = served[round_number % 2], served[1 - round_number % 2]
                core = half.core()
                kills = {whole.address: whole.kill, half.address: lambda pid=core: os.kill(pid, signal.SIGKILL)}
                number = trainee.publish_next()
                strikes = [
                    load.kill_within(number, kills[one.address], part=FIRST_PART * chance.random())
                    for one, load in zip(served, loads, strict=True)
                ]
                hits += sum(await asyncio.gather(*strikes))
                await are_back(served, number)
            await asyncio.to_thread(players.end)
            keeping.cancel()
            verdict = judge(trainee, players)
    assert hits >= NUM_ROUNDS, "fewer than half of the kills fell into an exchange"
    assert verdict.engines == {one.gate.url for one in served}
    figures |= {
        "load_kills": 2 * NUM_ROUNDS,
        "load_kills_in_the_middle": hits,
        "load_kill_exchange_ms": round(1000 * loads[0].usual_s),
        "load_kill_episodes": verdict.num_episodes,
    }


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_keepers_killed_in_the_middle_of_a_load_leave_it_to_the_next(
    database: Database,
    database_url: str,
    deep: Path,
    client: EngineClient,
    tmp_path: Path,
    figures: dict[str, object],
) -> None:
    """The engine loads to its end, and the next keeper loads once more, since nobody knows what it has."""
    chance = random.Random(5)
    trainee = Trainee(database, deep, tmp_path / "weights")
    log_file = tmp_path / "engine.log"
    loads = Loads(log_file)
    with serving(deep, log_file=log_file) as engine, keepers(database_url, tmp_path) as group:
        async with Gate(engine) as gate:
            with database.begin() as conn:
                engines.register(conn, gate.url, run_id=trainee.run.id)
            trainee.publish_next()
            owner = group.start()
            await loads.time_one(0)
            with playing(trainee, tmp_path) as players:
                hits = 0
                for _ in range(NUM_KEEPERS):
                    number = trainee.publish_next()
                    kill = lambda owner=owner: group.kill(owner)  # noqa: E731
                    hits += await loads.kill_within(number, kill, part=FIRST_PART * chance.random())
                    owner = group.start()
                    await until(lambda n=number: trainee.serves(gate.url, n), within_s=WITHIN_S)  # type: ignore[misc]
                    assert trainee.engine(gate.url).owner == owner
                    assert await client.weight_version(engine) == version_name(RUN, number)
                    assert not await client.is_paused(engine)
                await asyncio.to_thread(players.end)
                verdict = judge(trainee, players)
    assert hits >= NUM_KEEPERS / 2, "fewer than half of the kills fell into an exchange"
    figures |= {
        "load_keeper_kills": NUM_KEEPERS,
        "load_keeper_kills_in_the_middle": hits,
        "load_keeper_kill_episodes": verdict.num_episodes,
    }
