"""Weights from the trainer straight into an engine: everything but NCCL itself."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from common.db import engines
from common.weights import LOADING
from tests.integration import test_weight_keeper
from tests.integration.test_weight_keeper import LOAD, Scene
from tests.unit.workers.waiting import until
from trainer.engine_admin import EngineAdmin, TransferFailed
from trainer.transfer import FolderTransport, NcclTransport, Transport, hand_over, owning
from workers.scripted_engine import Fault, ScriptedEngine

scene = test_weight_keeper.scene
engine = test_weight_keeper.engine
ROUTES = ("/pause", "/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update")


class Concurrent:
    """As NCCL does: the engine's answer comes when it has received what is sent meanwhile, or never."""

    def __init__(self, folder: Path, *, broadcast: Callable[[], object]) -> None:
        self._folder = folder
        self._broadcast = broadcast
        self.ended = threading.Event()

    def send(self, engine: EngineAdmin) -> None:
        engine.start_weight_update()
        receiving = threading.Thread(target=engine.update_weights, args=({"path": str(self._folder)},), daemon=True)
        receiving.start()
        try:
            self._broadcast()
        finally:
            self.ended.set()
        receiving.join()
        engine.finish_weight_update()


async def transfer(
    engine: ScriptedEngine, transport: Transport, *, is_owned: Callable[[], bool] = lambda: True, limit_s: float = 5
) -> None:
    admin = EngineAdmin(engine.url, timeout_s=0.5, update_timeout_s=2)
    await asyncio.to_thread(hand_over, admin, transport, name="run-a/000007", is_owned=is_owned, limit_s=limit_s)


async def test_requests_under_way_go_on_with_what_was_handed_over(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path
) -> None:
    await transfer(engine, Concurrent(tmp_path, broadcast=lambda: time.sleep(0.05)))
    assert (engine.version, engine.weights, engine.paused) == ("run-a/000007", tmp_path, False)
    assert engine.calls == [*ROUTES, "/update_weight_version", "/resume"]


async def test_a_folder_goes_through_the_same_routes(scene: Scene, engine: ScriptedEngine, tmp_path: Path) -> None:
    await transfer(engine, FolderTransport(tmp_path))
    assert (engine.version, engine.weights, engine.paused) == ("run-a/000007", tmp_path, False)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_a_broken_step_leaves_nothing_paused_and_no_wrong_name(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path, route: str, fault: Fault
) -> None:
    engine.fail_next(route, fault)
    with pytest.raises(TransferFailed, match=rf"{engine.url} {route}"):
        await transfer(engine, FolderTransport(tmp_path))
    assert not engine.paused
    assert engine.version in ("default", LOADING)


async def test_a_lost_resume_is_tried_again(scene: Scene, engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.fail_next("/resume", Fault.CUT, Fault.ERROR)
    await transfer(engine, FolderTransport(tmp_path))
    assert not engine.paused


@pytest.mark.parametrize("route", [*ROUTES, "/resume"])
async def test_an_engine_that_hangs_holds_the_trainer_up_no_longer_than_its_limit(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path, route: str
) -> None:
    engine.fail_next(route, *[Fault.HANG] * 3)
    started = time.monotonic()
    with pytest.raises(TransferFailed, match=r"did not end within|timed out"):
        await transfer(engine, FolderTransport(tmp_path), limit_s=1)
    assert time.monotonic() - started < 10


async def test_a_broadcast_that_hangs_is_left_behind_and_the_engine_resumed(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path
) -> None:
    never = threading.Event()
    stuck = Concurrent(tmp_path, broadcast=lambda: never.wait(30))
    with pytest.raises(TransferFailed, match=r"sending run-a/000007 to engine .* did not end within 0.3 s"):
        await transfer(engine, stuck, limit_s=0.3)
    assert (engine.version, engine.paused) == (LOADING, False)
    never.set()
    assert await asyncio.to_thread(stuck.ended.wait, 10)


async def test_an_engine_that_was_lost_meanwhile_keeps_no_name(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path
) -> None:
    with pytest.raises(TransferFailed, match="took longer than its ownership lasted"):
        await transfer(engine, FolderTransport(tmp_path), is_owned=lambda: False)
    assert (engine.version, engine.paused) == (LOADING, False)


def engine_id(scene: Scene) -> int:
    with scene.database.begin() as conn:
        return int(conn.execute(text("SELECT id FROM engine")).scalar_one())


async def test_the_keeper_leaves_an_engine_alone_that_the_trainer_took_and_brings_it_up_to_date_after_a_failure(
    scene: Scene, engine: ScriptedEngine, tmp_path: Path
) -> None:
    scene.publish(0)
    async with scene.keeping():
        await scene.until_serving(engine, 0)
        with owning(scene.database, engine_id(scene), owner="trainer", lease_s=0.6) as is_owned:
            engine.calls.clear()
            scene.publish(1)
            engine.pause()
            engine.version = LOADING
            due = time.monotonic() + 1.2  # the lease is renewed twice meanwhile
            await until(lambda: time.monotonic() > due)
            assert is_owned()
            assert (engine.paused, engine.version) == (True, LOADING)
            assert LOAD not in engine.calls
        await scene.until_serving(engine, 1)


async def test_an_engine_that_its_keeper_loads_is_not_taken(scene: Scene, engine: ScriptedEngine) -> None:
    scene.publish(0)
    engine.fail_next(LOAD, Fault.HANG)
    async with scene.keeping():
        await until(lambda: LOAD in engine.calls)
        with (
            pytest.raises(TransferFailed, match="is being loaded by its keeper"),
            owning(scene.database, engine_id(scene), owner="trainer"),
        ):
            pytest.fail("taken")
        await engine.restart()
        await scene.until_serving(engine, 0)


async def test_a_lease_that_another_took_is_no_longer_ours(scene: Scene, engine: ScriptedEngine) -> None:
    with owning(scene.database, engine_id(scene), owner="trainer", lease_s=0.3) as is_owned:
        with scene.database.begin() as conn:
            conn.execute(text("UPDATE engine SET owner = 'other', loading = 1, owner_until = now() + interval '1 day'"))
        await until(lambda: not is_owned())
    with scene.database.begin() as conn:
        assert engines.claim(conn, engine_id(scene), owner="other") is not None


async def test_without_vllm_nccl_is_refused_and_the_engine_resumed(scene: Scene, engine: ScriptedEngine) -> None:
    if "vllm" in sys.modules:
        pytest.skip("vLLM is here")
    with pytest.raises(TransferFailed, match="ModuleNotFoundError: No module named 'vllm'"):
        await transfer(engine, NcclTransport(None, address="127.0.0.1", port=1))
    assert not engine.paused
