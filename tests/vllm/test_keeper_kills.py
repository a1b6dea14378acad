"""The weight keeper is killed at each step of its protocol, before and after the engine has heard of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import get_args

import pytest
from sqlalchemy import text

from common.config import InFlight
from common.db import engines
from common.db.session import Database
from common.weight_cache import WeightCache
from common.weights import LOADING, version_name
from tests.unit.workers.waiting import until
from tests.vllm.gate import Gate, Side, Stop
from tests.vllm.lone_keeper import Keepers, keepers
from tests.vllm.playing import WITHIN_S, Trainee, judge, playing, until_whole
from tests.vllm.serving import RUN
from workers.engine_client import EngineClient
from workers.weight_keeper import WeightKeeper

pytestmark = pytest.mark.long

NAME = "/update_weight_version"
STEPS = (
    ("/health", ""),
    ("/weight_info", ""),
    ("/is_paused", ""),
    ("/pause", ""),
    (NAME, LOADING),
    ("/collective_rpc", ""),
    (NAME, RUN),
    ("/resume", ""),
)
"""Route, and a word of its body, in the keeper's order."""
ASKED_ANYWAY = ("/health", "/weight_info", "/is_paused")
"""Also where there is no new version."""
NUM_UPDATES = 8


async def test_killed_at_each_step_it_leaves_nothing_behind(
    database: Database,
    database_url: str,
    gate: Gate,
    client: EngineClient,
    tiny: Path,
    tmp_path: Path,
    figures: dict[str, object],
) -> None:
    """Episodes wait at most until the next keeper has the engine; no token of theirs names a version it is not of."""
    trainee = Trainee(database, tiny, tmp_path / "weights")
    with database.begin() as conn:
        engines.register(conn, gate.url, run_id=trainee.run.id)

    with keepers(database_url, tmp_path) as group:
        trainee.publish_next()
        owner = group.start()
        await until_whole(trainee, client, gate.url, number=0, owner=owner)
        with playing(trainee, tmp_path) as players:
            slowest_s = 0.0
            for path, word in STEPS:
                for side in Side:
                    number = await stopped_with_a_new_version(trainee, stop := gate.stop_next(path, side, word=word))
                    group.kill(owner)
                    killed = time.monotonic()
                    stop.release(delivers=False)
                    owner = group.start()
                    await until_whole(trainee, client, gate.url, number=number, owner=owner)
                    slowest_s = max(slowest_s, time.monotonic() - killed)
            for is_done in (False, True):
                owner = await killed_at_the_row(trainee, gate, group, owner, is_done=is_done)
                await until_whole(trainee, client, gate.url, number=len(trainee.models) - 1, owner=owner)
            await asyncio.to_thread(players.end)
            verdict = judge(trainee, players)
    assert verdict.versions == set(trainee.models)
    assert verdict.straddling
    figures |= {
        "keeper_kills": 2 * len(STEPS) + 2,
        "keeper_kill_episodes": verdict.num_episodes,
        "keeper_kill_slowest_s": f"{slowest_s:.1f}",
    }


async def stopped_with_a_new_version(trainee: Trainee, stop: Stop) -> int:
    """Return the number of a version that the keeper is about to load, or to learn of."""
    if stop.path in ASKED_ANYWAY:
        # Published first, the version might be loaded by a look that is past this route.
        await stop.wait(within_s=WITHIN_S)
        return trainee.publish_next()
    number = trainee.publish_next()
    await stop.wait(within_s=WITHIN_S)
    return number


async def killed_at_the_row(trainee: Trainee, gate: Gate, group: Keepers, owner: str, *, is_done: bool) -> str:
    """Kill the keeper while it waits for the engine's row: to store what it has loaded, or to own the engine."""
    stop = gate.stop_next("/resume", Side.AFTER)
    await stopped_with_a_new_version(trainee, stop)
    if not is_done:
        # The next one then waits for the ownership.
        group.kill(owner)
        owner = group.start()
    with trainee.database.begin() as conn:
        conn.execute(text("SELECT id FROM engine WHERE url = :url FOR UPDATE"), {"url": gate.url})
        stop.release(delivers=is_done)
        await until(lambda: num_waiting(trainee.database) > 0, within_s=WITHIN_S)
        group.kill(owner)
    return group.start()


@pytest.mark.parametrize("in_flight", get_args(InFlight))
async def test_requests_under_way_do_what_the_run_wants(
    in_flight: InFlight, database: Database, gate: Gate, tiny: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    """Whatever it is, no turn is lost or longer than allowed, and each token is of the version that it names."""
    trainee = Trainee(database, tiny, tmp_path / "weights", in_flight=in_flight)
    with database.begin() as conn:
        engines.register(conn, gate.url, run_id=trainee.run.id)
    with playing(trainee, tmp_path) as players:
        keeper = WeightKeeper(database, players.client, owner="keeper", poll_s=0.1, cache=WeightCache(tmp_path))
        keeping = players.loop.submit(keeper.run())
        for number in range(NUM_UPDATES):
            trainee.publish_next()
            await until(lambda number=number: trainee.serves(gate.url, number), within_s=WITHIN_S)  # type: ignore[misc]
        await asyncio.to_thread(players.end)
        keeping.cancel()
        verdict = judge(trainee, players)
    assert verdict.longest_turn <= trainee.run.config.rollout.max_tokens_per_turn
    assert (verdict.straddling > 0) == (in_flight != "wait")
    assert trainee.engine(gate.url).num_loads == NUM_UPDATES
    assert (gate.num_aborted > 0) == (in_flight == "abort")
    figures[f"{in_flight}_episodes"] = verdict.num_episodes


async def test_a_file_that_changes_after_it_was_verified_is_refused(
    database: Database, gate: Gate, client: EngineClient, tiny: Path, tmp_path: Path
) -> None:
    """The keeper verifies before the pause; the engine checks once more what it reads, and its old weights serve on."""
    trainee = Trainee(database, tiny, tmp_path / "weights")
    trainee.publish_next()
    with database.begin() as conn:
        engines.register(conn, gate.url, run_id=trainee.run.id)
    keeping = asyncio.create_task(
        WeightKeeper(database, client, owner="keeper", poll_s=0.1, cache=WeightCache(tmp_path)).run()
    )
    await until(lambda: trainee.serves(gate.url, 0), within_s=WITHIN_S)
    stop = gate.stop_next("/collective_rpc", Side.BEFORE)
    number = trainee.publish_next()
    await stop.wait(within_s=WITHIN_S)
    file = tmp_path / "weights" / version_name(RUN, number) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    stop.release(delivers=True)
    await until(lambda: trainee.engine(gate.url).num_refusals == 1, within_s=WITHIN_S)
    row = trainee.engine(gate.url)
    assert (row.version, row.state) == (0, "SERVING")
    assert "has sha256" in row.error
    file.write_bytes(data)
    await until(lambda: trainee.serves(gate.url, number), within_s=WITHIN_S)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert not await client.is_paused(gate.url)


def num_waiting(database: Database) -> int:
    """Statements that wait for a lock in this database."""
    with database.begin() as conn:
        return conn.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
                " AND query LIKE '%UPDATE engine%'"
            )
        ).scalar_one()
