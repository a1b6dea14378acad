"""Kept connections that end under a request, and deadlines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from workers.engine_errors import EngineUnavailable
from workers.engine_http import EngineHttp
from workers.scripted_engine import Fault, ScriptedEngine

ROUTE = "/update_weight_version"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda prompt: [1])
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def http() -> AsyncIterator[EngineHttp]:
    http = EngineHttp()
    yield http
    await http.close()


async def name(http: EngineHttp, engine: ScriptedEngine, version: str) -> None:
    await http.ask("POST", engine.url, ROUTE, timeout_s=5, body={"new_version": version})


async def test_a_kept_connection_that_ends_unanswered_costs_nothing(http: EngineHttp, engine: ScriptedEngine) -> None:
    await name(http, engine, "v1")
    engine.fail_next(ROUTE, Fault.CLOSED)
    await name(http, engine, "v2")
    assert engine.version == "v2"
    assert engine.calls.count(ROUTE) == 3


async def test_a_request_is_sent_twice_at_most(http: EngineHttp, engine: ScriptedEngine) -> None:
    await name(http, engine, "v1")
    engine.fail_next(ROUTE, Fault.CLOSED, Fault.CLOSED)
    with pytest.raises(EngineUnavailable, match=ROUTE):
        await name(http, engine, "v2")
    assert engine.calls.count(ROUTE) == 3


async def test_a_new_connection_that_ends_is_the_engines_fault(http: EngineHttp, engine: ScriptedEngine) -> None:
    engine.fail_next(ROUTE, Fault.CLOSED)
    with pytest.raises(EngineUnavailable, match="ServerDisconnectedError"):
        await name(http, engine, "v1")
    assert engine.calls.count(ROUTE) == 1


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER])
async def test_an_answer_that_began_is_not_asked_for_again(
    http: EngineHttp, engine: ScriptedEngine, fault: Fault
) -> None:
    await name(http, engine, "v1")
    engine.fail_next(ROUTE, fault)
    with pytest.raises(EngineUnavailable, match="ClientPayloadError"):
        await name(http, engine, "v2")
    assert engine.calls.count(ROUTE) == 2


async def test_no_cookie_pins_all_episodes_to_one_replica(http: EngineHttp) -> None:
    sent: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Cookie"))
        response = web.json_response({})
        response.set_cookie("replica", "3")
        return response

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app, host="localhost") as server:
        for _ in range(2):
            await http.ask("GET", str(server.make_url("")).rstrip("/"), "/", timeout_s=5)
    assert sent == [None, None]


async def test_both_tries_share_one_deadline(http: EngineHttp, engine: ScriptedEngine) -> None:
    await name(http, engine, "v1")
    engine.fail_next(ROUTE, Fault.CLOSED, Fault.HANG)
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        await http.ask("POST", engine.url, ROUTE, timeout_s=0.2, body={"new_version": "v2"})


async def test_hundreds_of_requests_survive_the_end_of_their_connections(
    http: EngineHttp, engine: ScriptedEngine
) -> None:
    for round_number in range(3):
        await asyncio.gather(*[name(http, engine, f"v{number}") for number in range(300)])
        if round_number < 2:
            await engine.stop()
            await engine.start()
    assert engine.calls.count(ROUTE) == 900
    assert len(engine.peers) <= 900


async def test_an_engine_that_takes_no_connection_is_told_from_one_that_does_not_answer() -> None:
    http = EngineHttp(connect_timeout_s=0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]  # As many as the kernel lets wait, and more.
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with pytest.raises(EngineUnavailable, match=r"no connection within 0\.2 s"):
            await http.ask("GET", f"http://127.0.0.1:{full.getsockname()[1]}", "/", timeout_s=60)
        for one in waiting:
            one.close()
    await http.close()
