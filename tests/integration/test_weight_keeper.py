"""The weight keeper against a scripted engine: each step, each fault, each change of ownership.

Over 400 lines: every test plays one order of the same few steps, and a missing order is seen where all stand together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Row, text

from common.config import RunConfig
from common.db import engines, evaluations, runs, versions
from common.db.session import Database
from common.weight_cache import WeightCache
from common.weights import LOADING, MANIFEST, WeightStore
from tests.unit.workers.waiting import until
from tests.version_files import writing
from workers.engine_client import EngineClient
from workers.engine_list import fresh_enough
from workers.scripted_engine import Fault, ScriptedEngine
from workers.weight_keeper import WeightKeeper

POLL_S = 0.05
LOAD = "/collective_rpc"
NAME = "/update_weight_version"
PROTOCOL = ("/health", "/weight_info", "/is_paused", "/pause", NAME, LOAD, "/resume")


class Scene:
    """A run with versions on disk, and engines that belong to it."""

    def __init__(self, database: Database, client: EngineClient, store: WeightStore, run: runs.Run) -> None:
        self.database = database
        self.client = client
        self.store = store
        self.cache = WeightCache(store.root / "cache")
        self.run = run

    def publish(self, number: int) -> Path:
        published = self.store.publish(self.run.name, number, writing("model.bin", b"w" * (number + 1)))
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, number, published)
        return published.path

    def register(self, engine: ScriptedEngine) -> None:
        with self.database.begin() as conn:
            engines.register(conn, engine.url, run_id=self.run.id)

    def stored(self, engine: ScriptedEngine) -> Row[Any]:
        with self.database.begin() as conn:
            return conn.execute(text("SELECT * FROM engine WHERE url = :url"), {"url": engine.url}).one()

    @asynccontextmanager
    async def keeping(self, owner: str = "keeper", *, lease_s: float = 15) -> AsyncIterator[WeightKeeper]:
        keeper = WeightKeeper(self.database, self.client, owner=owner, poll_s=POLL_S, cache=self.cache, lease_s=lease_s)
        task = asyncio.create_task(keeper.run())
        yield keeper
        task.cancel()
        await asyncio.wait([task])

    async def until_serving(self, engine: ScriptedEngine, number: int) -> None:
        await until(lambda: self.stored(engine).version == number and self.stored(engine).state == "SERVING")
        assert engine.version == f"{self.run.name}/{number:06d}"
        assert engine.weights == self.store.path(self.run.name, number)
        assert not engine.paused


async def until_spent(engine: ScriptedEngine, path: str) -> None:
    """Until the fault of this call has happened."""
    await until(lambda: not engine.faults[path])


@pytest.fixture
async def scene(database: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    with database.begin() as conn:
        run = runs.open_run(conn, RunConfig(name="run-a", model=Path("model")))
    async with EngineClient(timeout_s=2) as client:
        yield Scene(database, client, WeightStore(tmp_path), run)


@pytest.fixture
async def engine(scene: Scene) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda prompt: [1] * 20)
    await engine.start()
    scene.register(engine)
    yield engine
    await engine.stop()


async def test_stays_with_a_version_until_it_is_evaluated_also_over_a_restart(
    scene: Scene, engine: ScriptedEngine
) -> None:
    with scene.database.begin() as conn:
        conn.execute(text("INSERT INTO evaluation_point (run_id, version) VALUES (:id, 1)"), {"id": scene.run.id})
    for number in range(3):
        scene.publish(number)
    async with scene.keeping():
        await scene.until_serving(engine, 1)
        await engine.stop()
        await until(lambda: scene.stored(engine).version is None)
        await engine.restart()
        await scene.until_serving(engine, 1)
        with scene.database.begin() as conn:
            evaluations.close(conn, scene.run.id, 1)
        await scene.until_serving(engine, 2)


async def test_loads_the_newest_version_at_start(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    scene.publish(1)
    async with scene.keeping():
        await scene.until_serving(engine, 1)
    order = [path for path in engine.calls if path in PROTOCOL]
    look = ["/health", "/weight_info", "/is_paused"]
    assert order[:10] == [*look, "/pause", NAME, LOAD, "/is_paused", NAME, "/resume", "/weight_info"]
    assert scene.stored(engine).wire == "vllm-generate"


async def test_one_that_somebody_resumed_under_a_load_forgets_what_it_decoded_meanwhile(
    scene: Scene, engine: ScriptedEngine
) -> None:
    scene.publish(0)
    engine.load_s = 0.3
    async with scene.keeping():
        await until(lambda: LOAD in engine.calls and engine.paused)
        engine.resume()
        await scene.until_serving(engine, 0)
    order = [path for path in engine.calls if path in PROTOCOL]
    assert order[3:10] == ["/pause", NAME, LOAD, "/is_paused", "/pause", NAME, "/resume"]


async def test_a_name_that_somebody_else_gave_is_not_taken_for_what_was_loaded(
    scene: Scene, engine: ScriptedEngine
) -> None:
    scene.publish(0)
    scene.publish(1)
    engine.fail_next("/resume", Fault.ERROR)
    async with scene.keeping():
        await until(lambda: "/resume" in engine.calls)
        engine.version = "run-a/000000"
        await until(lambda: scene.stored(engine).num_failures + scene.stored(engine).failures > 0)
        assert "named it run-a/000000 since" in scene.stored(engine).error
        assert scene.stored(engine).version is None
        await scene.until_serving(engine, 1)
    assert engine.calls.count(LOAD) == 2


async def test_an_announcement_is_faster_than_the_poll(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    keeper = WeightKeeper(scene.database, scene.client, owner="keeper", poll_s=60, cache=scene.cache)
    task = asyncio.create_task(keeper.run())
    await scene.until_serving(engine, 0)
    for number in range(1, 10):  # each comes while the keeper takes its last look after the one before
        scene.publish(number)
        keeper.announce()
        await scene.until_serving(engine, number)
    task.cancel()
    await asyncio.wait([task])


async def test_a_version_without_announcement_is_found(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        scene.publish(1)
        await scene.until_serving(engine, 1)


async def test_waits_for_the_first_version(scene: Scene, engine: ScriptedEngine) -> None:
    async with scene.keeping():
        await until(lambda: engine.calls.count("/is_paused") >= 2)
        assert scene.stored(engine).version is None
        assert "/pause" not in engine.calls
        scene.publish(0)
        await scene.until_serving(engine, 0)


async def test_requests_go_on_with_the_new_weights(scene: Scene, engine: ScriptedEngine) -> None:
    engine.token_s = 0.02
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        task = asyncio.create_task(
            scene.client.generate(
                engine.url,
                request_id="r",
                prompt_ids=[1],
                max_tokens=20,
                temperature=1.0,
                stop_ids=[],
                model=None,
                run="run-a",
            )
        )
        await until(lambda: engine.num_tokens >= 2)
        scene.publish(1)
        sampled = await task
    assert [span.version for span in sampled.spans] == [0, 1]
    assert len(sampled.ids) == 20


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_recovers_from_a_broken_step(scene: Scene, engine: ScriptedEngine, fault: Fault) -> None:
    async with scene.keeping():
        for number, path in enumerate(PROTOCOL):
            engine.fail_next(path, fault)
            scene.publish(number)
            await scene.until_serving(engine, number)
            assert not engine.faults[path], f"{path} was never called"


async def test_recovers_from_a_restart_at_each_step(scene: Scene, engine: ScriptedEngine) -> None:
    async with scene.keeping():
        for number, path in enumerate(PROTOCOL):
            engine.fail_next(path, Fault.HANG)
            scene.publish(number)
            await until_spent(engine, path)
            await engine.stop()
            await until(lambda: scene.stored(engine).failures > 0)
            assert scene.stored(engine).version is None, f"{path} hung, and then the engine was gone"
            await engine.restart()
            await scene.until_serving(engine, number)


async def test_a_step_that_breaks_over_and_over_leaves_nothing_paused(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.fail_next(LOAD, *[Fault.ERROR] * 3)
        scene.publish(1)
        await until(lambda: scene.stored(engine).state == "QUARANTINED")
        assert not engine.paused
        assert scene.stored(engine).version is None
        await scene.until_serving(engine, 1)


async def test_refused_weights_leave_the_old_ones_serving(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.accept = lambda path: "tensor a has another shape"
        scene.publish(1)
        await until(lambda: scene.stored(engine).failures == 1)
        stored = scene.stored(engine)
        assert (stored.version, stored.state) == (0, "SERVING")
        assert "tensor a has another shape" in (stored.error or "")
        assert engine.version == "run-a/000000"
        assert not engine.paused
        await until(lambda: scene.stored(engine).state == "QUARANTINED")
        engine.accept = lambda path: None
        await scene.until_serving(engine, 1)


async def test_a_damaged_folder_pauses_no_engine(
    scene: Scene, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.calls.clear()
        with caplog.at_level(logging.ERROR):
            (scene.publish(1) / "model.bin").write_bytes(b"xx!")
            await until(lambda: engine.calls.count("/health") >= 3)
        assert "/pause" not in engine.calls
        assert scene.stored(engine).failures == 0
        assert (scene.stored(engine).version, scene.stored(engine).state) == (0, "SERVING")
        assert len([record for record in caplog.records if "model.bin has 3 bytes" in record.message]) == 1
        scene.publish(1)
        await scene.until_serving(engine, 1)


async def test_an_engine_that_falls_too_far_behind_raises_an_alarm(
    scene: Scene, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def alarms() -> list[str]:
        return [record.message for record in caplog.records if "gets no new work" in record.message]

    def serving() -> list[str]:
        with scene.database.begin() as conn:
            return fresh_enough(engines.serving(conn, scene.run.id), scene.run.config.train.max_staleness)

    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        with caplog.at_level(logging.ERROR):
            (scene.publish(1) / "model.bin").write_bytes(b"xx!")
            await until(lambda: scene.stored(engine).num_refusals >= 2)
            assert alarms() == []
            assert serving() == [engine.url]
            (scene.publish(2) / "model.bin").write_bytes(b"xx!")
            await until(lambda: len(alarms()) == 1)
        assert f"engine={engine.url} serves=0 newest=2 max_staleness=1" in alarms()[0]
        assert serving() == []
        with scene.database.begin() as conn:
            (shown,) = engines.status(conn)
        assert (shown.version, shown.newest) == (0, 2)
        scene.publish(3)
        await scene.until_serving(engine, 3)
        await until(lambda: any("over: engine gets no new work" in record.message for record in caplog.records))
    assert serving() == [engine.url]


async def test_loads_refusals_and_failures_are_counted(scene: Scene, engine: ScriptedEngine) -> None:
    def counts() -> tuple[int, int, int]:
        row = scene.stored(engine)
        return row.num_loads, row.num_refusals, row.num_failures

    async with scene.keeping():
        for number in range(2):
            scene.publish(number)
            await scene.until_serving(engine, number)
        assert counts() == (2, 0, 0)
        refusals = iter(["tensor a has another shape"])
        engine.accept = lambda path: next(refusals, None)
        scene.publish(2)
        await scene.until_serving(engine, 2)
        assert counts() == (3, 1, 0)
        engine.fail_next(LOAD, Fault.ERROR)
        scene.publish(3)
        await scene.until_serving(engine, 3)
        assert counts() == (4, 1, 1)


async def test_a_run_without_an_engine_says_why_and_an_incident_is_counted_once(
    scene: Scene, engine: ScriptedEngine
) -> None:
    def trouble() -> str | None:
        with scene.database.begin() as conn:
            return engines.trouble(conn, scene.run.id)

    assert trouble() is None  # It is still starting.
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.fail_next("/health", *[Fault.ERROR] * 3)
        await until(lambda: scene.stored(engine).state == "QUARANTINED")
        assert (trouble() or "").startswith(f"no engine serves this run: {engine.url} quarantined: ")
        await scene.until_serving(engine, 0)
        assert trouble() is None
        assert scene.stored(engine).num_failures == 1


async def test_a_missing_manifest_is_named(scene: Scene, engine: ScriptedEngine) -> None:
    (scene.publish(0) / MANIFEST).unlink()
    async with scene.keeping():
        await until(lambda: MANIFEST in (scene.stored(engine).error or ""))
    assert "/pause" not in engine.calls


async def test_an_engine_that_was_restarted_gets_no_work_until_it_is_loaded(
    scene: Scene, engine: ScriptedEngine
) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.accept = lambda path: "not yet"
        engine.version, engine.weights = "default", None
        await until(lambda: scene.stored(engine).version is None)
        engine.accept = lambda path: None
        await scene.until_serving(engine, 0)


async def test_an_unreachable_engine_does_not_hold_the_live_version(scene: Scene, engine: ScriptedEngine) -> None:
    other = ScriptedEngine(lambda prompt: [1])
    await other.start()
    scene.register(other)
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        await scene.until_serving(other, 0)
        await engine.stop()
        scene.publish(1)
        await scene.until_serving(other, 1)
        await until(lambda: scene.stored(engine).version is None)
        with scene.database.begin() as conn:
            assert engines.live_version(conn, scene.run.id) == 1
    await other.stop()


async def test_an_engine_that_was_left_paused_is_resumed(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        engine.pause()
        await until(lambda: not engine.paused)
    assert engine.version == "run-a/000000"


async def test_an_engine_left_in_mid_load_is_loaded_anew(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    scene.publish(1)
    engine.weights = scene.store.path("run-a", 1)
    engine.version = LOADING
    engine.pause()
    async with scene.keeping():
        await scene.until_serving(engine, 1)


async def test_a_stopped_keeper_resumes_what_it_paused(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    engine.fail_next(LOAD, Fault.HANG)
    async with scene.keeping():
        await until(lambda: engine.paused and LOAD in engine.calls)
    assert not engine.paused


async def test_only_the_owner_loads(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping("first"), scene.keeping("second"):
        await scene.until_serving(engine, 0)
        for number in range(1, 5):
            scene.publish(number)
            await scene.until_serving(engine, number)
    assert engine.calls.count("/pause") == 5
    assert scene.stored(engine).owner == "first"


async def test_an_engine_of_a_dead_keeper_is_taken_over(scene: Scene, engine: ScriptedEngine) -> None:
    with scene.database.begin() as conn:
        assert [row.url for row in engines.own(conn, "dead", lease_s=0.3)] == [engine.url]
    scene.publish(0)
    async with scene.keeping("alive"):
        await scene.until_serving(engine, 0)
    assert scene.stored(engine).owner == "alive"


async def test_the_lease_is_renewed_while_an_engine_loads(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    engine.fail_next(LOAD, Fault.HANG)
    async with scene.keeping("first", lease_s=0.5), scene.keeping("second", lease_s=0.5):
        await until(lambda: LOAD in engine.calls)
        owner = scene.stored(engine).owner
        due = time.monotonic() + 1.0
        await until(lambda: time.monotonic() > due)
        assert scene.stored(engine).owner == owner
        await engine.restart()
        await scene.until_serving(engine, 0)


async def test_a_keeper_that_lost_its_engine_leaves_the_name_to_the_next(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    engine.load_s = 0.4
    stalled = WeightKeeper(scene.database, scene.client, owner="stalled", poll_s=60, cache=scene.cache, lease_s=0.2)
    task = asyncio.create_task(stalled.run())
    await until(lambda: "longer than its ownership" in (scene.stored(engine).error or ""))
    assert (engine.version, engine.paused) == (LOADING, False)
    engine.load_s = 0.0
    async with scene.keeping("next"):
        await scene.until_serving(engine, 0)
    task.cancel()
    await asyncio.wait([task])


async def test_engines_are_loaded_side_by_side(scene: Scene, engine: ScriptedEngine) -> None:
    other = ScriptedEngine(lambda prompt: [1])
    await other.start()
    scene.register(other)
    scene.publish(0)
    engine.fail_next(LOAD, Fault.HANG)
    async with scene.keeping():
        await scene.until_serving(other, 0)
        assert scene.stored(engine).version is None
    await other.stop()


async def test_an_engine_that_is_still_starting_has_not_failed(
    scene: Scene, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """At the address of one that failed before; what it does later is a failure."""
    scene.publish(0)
    async with scene.keeping("one", lease_s=1):
        await scene.until_serving(engine, 0)
        await engine.stop()
        await until(lambda: scene.stored(engine).num_failures == 1)
    assert f"weights not loaded engine={engine.url}" in caplog.text
    caplog.clear()
    scene.register(engine)
    assert scene.stored(engine).error is None
    async with scene.keeping("another", lease_s=1):
        await until(lambda: scene.stored(engine).failures >= 2)
        await engine.restart()
        await scene.until_serving(engine, 0)
        assert scene.stored(engine).num_failures == 1
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"engine does not answer yet engine={engine.url}" in said
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_an_engine_may_be_moved_to_another_run(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        with scene.database.begin() as conn:
            scene.run = runs.open_run(conn, RunConfig(name="run-b", model=Path("model")))
            engines.register(conn, engine.url, run_id=scene.run.id)
        await until(lambda: scene.stored(engine).version is None)
        scene.publish(3)
        await scene.until_serving(engine, 3)
