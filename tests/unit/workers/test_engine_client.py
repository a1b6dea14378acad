from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.episode import FinishReason, Sampled, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow, EngineUnavailable, LoadRefused, Superseded, Unversioned
from workers.scripted_engine import Fault, ScriptedEngine

GENERATE = "/inference/v1/generate"


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeout_s=5) as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda prompt: [100 + len(prompt), 2, 3, 4])
    engine.version = "run-a/000003"
    await engine.start()
    yield engine
    await engine.stop()


Respond = Callable[[int, str], Awaitable[str]]


@pytest.fixture
async def answering() -> AsyncIterator[Respond]:
    """Start a server that answers one status and body to everything; gives its URL."""
    runners: list[web.AppRunner] = []

    async def start(status: int, body: str) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=status, text=body, content_type="application/json")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def generate(client: EngineClient, url: str, **changes: Any) -> Sampled:
    usual: dict[str, Any] = {
        "request_id": "r1",
        "prompt_ids": [1, 2, 3],
        "max_tokens": 10,
        "temperature": 1.0,
        "stop_ids": [3],
        "model": None,
        "run": "run-a",
    }
    return await client.generate(url, **(usual | changes))


async def test_generate_gives_what_the_engine_sampled(client: EngineClient, engine: ScriptedEngine) -> None:
    assert await generate(client, engine.url) == Sampled(
        ids=(103, 2, 3),
        logprobs=(-0.5, -0.5, -0.5),
        spans=(VersionSpan(version=3, start=0, end=3),),
        finish_reason=FinishReason.STOP,
    )


async def test_every_request_asks_for_log_probs_and_is_not_streamed(client: EngineClient) -> None:
    bodies: list[dict[str, Any]] = []

    async def note(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post(GENERATE, note)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with pytest.raises(EngineUnavailable):
        await generate(client, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()

    assert bodies[0]["sampling_params"]["logprobs"] == 0
    assert not bodies[0].get("stream")


async def test_max_tokens_ends_by_length(client: EngineClient, engine: ScriptedEngine) -> None:
    sampled = await generate(client, engine.url, max_tokens=2)
    assert sampled.ids == (103, 2)
    assert sampled.finish_reason is FinishReason.LENGTH


async def test_calls_share_one_connection(client: EngineClient, engine: ScriptedEngine) -> None:
    for _ in range(3):
        await client.check_health(engine.url)
    assert len(engine.peers) == 1


async def test_a_turn_is_one_request_and_asks_for_all_that_a_capture_needs(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    for _ in range(3):
        assert len((await generate(client, engine.url)).logprobs) == 3
    assert engine.calls == [GENERATE] * 3


async def test_start_weights_are_unversioned(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.version = "default"
    with pytest.raises(Unversioned, match="'default'"):
        await generate(client, engine.url)


async def test_a_prompt_that_fills_the_context_is_told_apart(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.max_model_len = 3
    with pytest.raises(ContextOverflow, match="maximum context length is 3"):
        await generate(client, engine.url)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens, the prompt has 2000",
        "The decoder prompt (length 2000) is longer than the maximum model length of 1024.",
        "The input (2000 tokens) is longer than the model's context length (1024 tokens).",
        "max_tokens must be at least 1, got 0. (1024)",
        "the prompt has 2000 tokens, but the maximum model length of 1024 includes at least one new token",
    ],
)
async def test_words_of_context_overflow(client: EngineClient, answering: Respond, message: str) -> None:
    url = await answering(400, json.dumps({"error": {"message": message, "code": 400}}))
    with pytest.raises(ContextOverflow, match="1024"):
        await generate(client, url)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_wrong_request_is_not_tried_elsewhere(client: EngineClient, answering: Respond, status: int) -> None:
    url = await answering(status, '{"error": {"message": "Token id 600 is out of vocabulary"}}')
    with pytest.raises(EpisodeError, match="Token id 600 is out of vocabulary") as caught:
        await generate(client, url)
    assert caught.value.outcome is Outcome.HANDLER_FAILED


@pytest.mark.parametrize("status", [403, 404, 408, 429, 500, 502, 503])
async def test_other_refusals_are_the_engines(client: EngineClient, answering: Respond, status: int) -> None:
    url = await answering(status, '{"detail": "no such thing"}')
    with pytest.raises(EngineUnavailable, match=f"answers {status}.*no such thing"):
        await generate(client, url)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_AFTER, Fault.ERROR])
async def test_a_broken_answer_is_unavailable(client: EngineClient, engine: ScriptedEngine, fault: Fault) -> None:
    engine.fail_next(GENERATE, fault)
    with pytest.raises(EngineUnavailable, match=GENERATE):
        await generate(client, engine.url)


async def test_an_engine_that_is_gone_is_unavailable(client: EngineClient, engine: ScriptedEngine) -> None:
    await engine.stop()
    with pytest.raises(EngineUnavailable):
        await generate(client, engine.url)


async def test_a_hanging_engine_is_given_up(engine: ScriptedEngine) -> None:
    engine.fail_next(GENERATE, Fault.HANG)
    async with EngineClient(timeout_s=0.1) as client:
        with pytest.raises(EngineUnavailable, match=r"within 0\.1 s"):
            await generate(client, engine.url)


async def test_cancelling_ends_the_request_on_the_engine(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.pause()
    task = asyncio.create_task(generate(client, engine.url))
    await until(lambda: bool(engine.open))
    task.cancel()
    await until(lambda: not engine.open)


async def test_abort_names_requests_as_the_engine_does(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.pause()
    task = asyncio.create_task(generate(client, engine.url, request_id="r7"))
    await until(lambda: bool(engine.open))
    assert await client.abort(engine.url, ["r8"]) == 0
    assert await client.abort(engine.url, ["r7"]) == 1
    assert (await task).finish_reason is FinishReason.ABORT


async def test_weights_are_exchanged_between_pause_and_resume(
    client: EngineClient, engine: ScriptedEngine, tmp_path: Path
) -> None:
    url = engine.url
    await client.pause(url)
    assert await client.is_paused(url)
    await client.load_version(url, tmp_path, "run-a/000004")
    await client.update_weight_version(url, "run-a/000004")
    await client.resume(url)
    assert not await client.is_paused(url)
    assert await client.weight_version(url) == "run-a/000004"
    assert engine.weights == tmp_path


async def test_a_span_changes_where_the_weights_did(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.token_s = 0.02
    task = asyncio.create_task(generate(client, engine.url, stop_ids=[]))
    await until(lambda: engine.num_tokens >= 1)
    await client.update_weight_version(engine.url, "run-a/000004")
    spans = (await task).spans
    assert [span.version for span in spans] == [3, 4]
    assert spans[-1].end == 4


async def test_refused_weights_are_told_apart(client: EngineClient, engine: ScriptedEngine) -> None:
    with pytest.raises(LoadRefused, match="no folder /nowhere"):
        await client.load_version(engine.url, Path("/nowhere"), "run-a/000004")
    assert engine.weights is None


async def test_ranks_that_disagree_leave_the_weights_unknown(client: EngineClient, answering: Respond) -> None:
    url = await answering(200, '{"results": [{"ok": true}, {"ok": false, "error": "short file"}]}')
    with pytest.raises(EngineUnavailable, match="1 of 2 ranks refuse run-a/000004: short file"):
        await client.load_version(url, Path("/x"), "run-a/000004")


async def test_a_claim_that_was_overtaken_is_told_apart(client: EngineClient, answering: Respond) -> None:
    url = await answering(409, '{"error": {"message": "claim 7 is older than 8"}}')
    for call in (
        client.pause(url, claim=7),
        client.resume(url, claim=7),
        client.update_weight_version(url, "run-a/000004", claim=7),
        client.load_version(url, Path("/x"), "run-a/000004", claim=7),
    ):
        with pytest.raises(Superseded, match="claim 7 is older than 8"):
            await call


async def test_a_load_that_one_rank_says_comes_late_is_none(client: EngineClient, answering: Respond) -> None:
    url = await answering(200, '{"results": [{"ok": true}, {"ok": false, "superseded": true, "error": "too late"}]}')
    with pytest.raises(Superseded, match="loads no run-a/000004: too late"):
        await client.load_version(url, Path("/x"), "run-a/000004", claim=7)


@pytest.mark.parametrize("body", ["{}", "[]", "null", "not json", '{"status": "no", "success": false, "results": []}'])
async def test_an_answer_that_confirms_nothing_is_no_success(
    client: EngineClient, answering: Respond, body: str
) -> None:
    url = await answering(200, body)
    for call in (
        client.pause(url),
        client.resume(url),
        client.is_paused(url),
        client.weight_version(url),
        client.update_weight_version(url, "run-a/000004"),
        client.load_version(url, Path("/x"), "run-a/000004"),
        client.abort(url, ["r"]),
    ):
        with pytest.raises(EngineUnavailable, match="answers"):
            await call
