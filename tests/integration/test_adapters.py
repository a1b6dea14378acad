"""The weight keeper over engines that take LoRA versions as adapters, and requests that name them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy import Connection, Row, text

from common.config import EvalConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, evaluations, runs, versions
from common.db.engines import EngineRow
from common.db.session import Database
from common.episode import FinishReason, Sampled
from common.object_store import ObjectStore
from common.weight_cache import WeightCache
from common.weights import Published, VersionStore, WeightStore, version_name
from tests.claims import make_claim
from tests.unit.workers.waiting import until
from tests.version_files import writing
from workers.engine_client import EngineClient
from workers.engine_list import CACHE_S
from workers.engine_pool import EnginePool
from workers.scripted_engine import Fault, ScriptedEngine
from workers.weight_keeper import WeightKeeper

POLL_S = 0.05
CONFIG = RunConfig(name="run-a", model=Path("model"), train=TrainConfig(lora_rank=8, max_staleness=1))
FILE = "adapter.bin"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TOLD = ("/health", "/weight_info", "/v1/models", LOAD)


class Scene:
    """A LoRA run with versions on disk, an engine, and a pool that asks it."""

    def __init__(
        self,
        database: Database,
        client: EngineClient,
        store: WeightStore,
        engine: ScriptedEngine,
        *,
        config: RunConfig = CONFIG,
    ) -> None:
        self.database = database
        self.client = client
        self.store = store
        self.engine = engine
        self.cache = WeightCache(store.root / "cache")
        self.pool = EnginePool(client, self.rows, wait_s=5)
        with database.begin() as conn:
            self.run = runs.open_run(conn, config)
            engines.register(conn, engine.url, run_id=self.run.id)

    def rows(self, run_id: int) -> list[EngineRow]:
        with self.database.begin() as conn:
            return engines.serving(conn, run_id)

    def publish(self, number: int, *, store: VersionStore | None = None) -> Published:
        published = (store or self.store).publish(self.run.name, number, writing(FILE, b"w" * (number + 1)))
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, number, published)
        return published

    @property
    def stored(self) -> Row[Any]:
        with self.database.begin() as conn:
            return conn.execute(text("SELECT * FROM engine")).one()

    def stored_id(self, conn: Connection) -> int:
        return int(conn.execute(text("SELECT id FROM engine")).scalar_one())

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        keeper = WeightKeeper(self.database, self.client, owner="keeper", poll_s=POLL_S, cache=self.cache)
        task = asyncio.create_task(keeper.run())
        yield
        task.cancel()
        await asyncio.wait([task])

    async def until_serving(self, number: int) -> None:
        await until(lambda: self.stored.version == number and self.stored.state == "SERVING")
        assert self.engine.adapters[version_name("run-a", number)] == str(self.store.path("run-a", number))

    async def until_stored(self, number: int) -> None:
        await until(lambda: self.stored.version == number)

    async def until_held(self, *numbers: int) -> None:
        await until(lambda: set(self.engine.adapters) == {version_name("run-a", number) for number in numbers})

    async def turn(self, *, episode: int = 1, eval_version: int | None = None) -> Sampled:
        """One turn, over the pool as RUN takes it."""
        claim = make_claim(self.run.config, episode=episode, run_id=self.run.id, eval_version=eval_version)
        return (await self.pool.generate(claim, [1], request_id=uuid4().hex, stop_ids=(29,))).sampled


@pytest.fixture
async def scene(database: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    engine = ScriptedEngine(lambda prompt: [7] * (41 - len(prompt)))
    await engine.start()
    async with EngineClient(timeout_s=5) as client:
        yield Scene(database, client, WeightStore(tmp_path), engine)
    await engine.stop()


def versions_of(sampled: Sampled) -> list[int]:
    return [span.version for span in sampled.spans]


async def test_loads_beside_what_runs_and_keeps_the_window(scene: Scene) -> None:
    async with scene.keeping():
        for number in range(6):
            scene.publish(number)
            await scene.until_serving(number)
        await scene.until_held(3, 4, 5)
    assert not {"/pause", "/collective_rpc", "/update_weight_version"} & set(scene.engine.calls)
    assert scene.engine.version == "default"


async def test_a_request_keeps_its_adapter_and_the_next_turn_takes_the_newest(scene: Scene) -> None:
    """Its adapter is out of the window before it ends, and is unloaded only then."""
    scene.engine.token_s = 0.03
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
        running = asyncio.create_task(scene.turn())
        await until(lambda: scene.engine.num_tokens >= 2)
        for number in range(1, 5):
            scene.publish(number)
            await scene.until_serving(number)
        await scene.until_held(0, 2, 3, 4)
        assert not running.done()
        scene.engine.token_s = 0
        assert versions_of(await running) == [0]
        await asyncio.sleep(CACHE_S)  # The pool's list of engines may be as old as that.
        assert versions_of(await scene.turn()) == [4]
        scene.publish(5)
        await scene.until_held(3, 4, 5)


async def test_an_aborted_request_goes_on_with_the_newest_adapter(scene: Scene) -> None:
    scene.engine.token_s = 0.02
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
        running = asyncio.create_task(scene.turn())
        await until(lambda: scene.engine.num_tokens >= 3)
        scene.publish(1)
        await scene.until_serving(1)
        # By then the pool's list of engines is too old to go by.
        await until(lambda: scene.engine.num_tokens >= 16)
        await scene.client.abort(scene.engine.url, [next(iter(scene.engine.open)).removeprefix("generate-tokens-")])
        scene.engine.token_s = 0
        sampled = await running
    assert versions_of(sampled) == [0, 1]
    assert (len(sampled.ids), sampled.finish_reason) == (40, FinishReason.LENGTH)


async def test_a_request_for_an_adapter_that_is_gone_is_asked_again_and_none_is_lost(scene: Scene) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
        scene.engine.adapters.clear()
        turns = [asyncio.create_task(scene.turn(episode=number)) for number in range(8)]
        assert [versions_of(sampled) for sampled in await asyncio.gather(*turns)] == [[0]] * 8


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_recovers_from_a_broken_step(scene: Scene, fault: Fault) -> None:
    async with scene.keeping():
        for number, path in enumerate(TOLD):
            scene.engine.fail_next(path, fault)
            scene.publish(number)
            await scene.until_serving(number)
            assert not scene.engine.faults[path], f"{path} was never called"
        for number, path in enumerate(("/metrics", UNLOAD), len(TOLD)):
            scene.engine.fail_next(path, fault)
            scene.publish(number)
            await scene.until_serving(number)
            await scene.until_held(number - 2, number - 1, number)


async def test_a_new_process_gets_the_newest_adapter(scene: Scene) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
        await scene.engine.restart()
        await until(lambda: bool(scene.engine.adapters))
        await scene.until_serving(0)
        assert versions_of(await scene.turn()) == [0]


async def test_a_refused_adapter_leaves_the_old_one_serving(scene: Scene) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
        scene.engine.accept = lambda path: "LoRA rank 64 is greater than max_lora_rank 8"
        scene.publish(1)
        await until(lambda: scene.stored.failures == 1)
        assert (scene.stored.num_loads, scene.stored.num_refusals, scene.stored.num_failures) == (1, 1, 0)
        assert (scene.stored.version, scene.stored.state) == (0, "SERVING")
        assert "LoRA rank 64 is greater" in scene.stored.error
        assert versions_of(await scene.turn()) == [0]
        scene.engine.accept = lambda path: None
        await scene.until_serving(1)


async def test_a_damaged_adapter_reaches_no_engine(scene: Scene) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)
    path = scene.publish(1).path
    (path / FILE).write_bytes(b"w")
    async with scene.keeping():
        await until(lambda: scene.stored.num_refusals >= 2)
        assert scene.stored.failures == 0
        assert (scene.stored.version, scene.stored.state) == (0, "SERVING")
        assert f"{FILE} has 1 bytes, published were 2" in scene.stored.error
        assert set(scene.engine.adapters) == {"run-a/000000"}


@pytest.mark.parametrize("name", ["run-b/000004", "loading"])
async def test_an_engine_whose_own_weights_were_exchanged_gets_no_work(scene: Scene, name: str) -> None:
    scene.engine.version = name
    scene.publish(0)
    async with scene.keeping():
        await until(lambda: scene.stored.state == "QUARANTINED")
    assert f"has weights {name}, and adapters belong on start weights" in scene.stored.error
    assert scene.stored.version is None
    assert not scene.engine.adapters


async def test_a_name_that_another_folder_has_is_taken_from_it(scene: Scene) -> None:
    """An engine that outlived its database: the same run and number meant other weights."""
    scene.engine.adapters["run-a/000000"] = "/elsewhere/run-a/000000"
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(0)


async def test_adapters_in_a_bucket_are_loaded_from_the_cache_and_stay_there_as_long_as_they_may_be_read(
    scene: Scene,
) -> None:
    bucket = ObjectStore("memory://adapters")
    async with scene.keeping():
        for number in range(8):
            scene.publish(number, store=bucket)
            await scene.until_stored(number)
        await scene.until_held(5, 6, 7)
        last = scene.engine.adapters["run-a/000007"]
    assert scene.stored.num_loads == 8
    assert Path(last).parent == scene.store.root / "cache"
    # Two for each that an engine of this run keeps, as of the moment at which the last was fetched.
    assert {entry.name[:6] for entry in Path(last).parent.iterdir() if entry.is_dir()} == {
        f"{number:06d}" for number in range(1, 8)
    }
    MemoryFileSystem.store.clear()


def test_the_folders_that_an_engine_may_read_again_are_needed(scene: Scene) -> None:
    for number in range(12):
        scene.publish(number)
    with scene.database.begin() as conn:
        engines.own(conn, "keeper", lease_s=60)
        engines.serves(conn, scene.stored_id(conn), owner="keeper", version=8)
        assert versions.needed(conn, scene.run.id) == set(range(3, 9))
        engines.starts_loading(conn, scene.stored_id(conn), owner="keeper", version=9)
        assert versions.needed(conn, scene.run.id) == set(range(3, 10))
        assert {version.number for version in versions.loadable(conn)} == set(range(3, 10))


async def test_an_engine_that_was_left_paused_is_resumed(scene: Scene) -> None:
    scene.engine.pause()
    scene.publish(0)
    async with scene.keeping():
        await until(lambda: not scene.engine.paused)
        await scene.until_serving(0)


async def test_an_evaluation_is_played_with_its_adapter_and_the_next_one_is_served_after_it(
    database: Database, tmp_path: Path
) -> None:
    engine = ScriptedEngine(lambda prompt: [7] * 5)
    await engine.start()
    config = CONFIG.model_copy(update={"eval": EvalConfig(every_versions=10)})
    async with EngineClient(timeout_s=5) as client:
        scene = Scene(database, client, WeightStore(tmp_path), engine, config=config)
        async with scene.keeping():
            scene.publish(0)
            await scene.until_serving(0)
            scene.publish(1)
            assert versions_of(await scene.turn(eval_version=0)) == [0]
            with database.begin() as conn:
                assert evaluations.is_pending(conn, scene.run.id)
                conn.execute(text("UPDATE evaluation_point SET finished_at = now()"))
            await scene.until_serving(1)
            # The pool's list of engines may be a moment old.
            async with asyncio.timeout(60):
                seen = [0]
                while seen != [1]:
                    seen = versions_of(await scene.turn())
    await engine.stop()
