"""SGLang's native routes, through the client that finds out by itself who answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.episode import FinishReason, Sampled, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.sglang_server import SglangServer
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow, EngineUnavailable, LoadRefused, Unversioned


@pytest.fixture
async def server() -> AsyncIterator[SglangServer]:
    server = SglangServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeout_s=5) as client:
        yield client


async def generate(client: EngineClient, url: str, **changes: Any) -> Sampled:
    usual: dict[str, Any] = {
        "request_id": "r1",
        "prompt_ids": [1, 2, 3],
        "max_tokens": 10,
        "temperature": 0.7,
        "stop_ids": [101],
        "model": None,
        "run": "run-a",
    }
    return await client.generate(url, **(usual | changes))


async def test_what_was_sampled_comes_whole(client: EngineClient, server: SglangServer) -> None:
    assert await generate(client, server.url) == Sampled(
        ids=(100, 101),
        logprobs=(-0.5, -0.5),
        spans=(VersionSpan(version=3, start=0, end=2),),
        finish_reason=FinishReason.STOP,
    )
    assert server.bodies["/generate"] == {
        "rid": "r1",
        "input_ids": [1, 2, 3],
        "sampling_params": {
            "max_new_tokens": 10,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": None,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "stop": None,
            "stop_regex": None,
            "stop_token_ids": [101],
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "custom_params": None,
            "n": 1,
        },
        "return_logprob": True,
    }


async def test_a_run_of_adapters_is_told_that_it_needs_another_engine(
    client: EngineClient, server: SglangServer
) -> None:
    for call in (
        generate(client, server.url, adapter=3),
        client.adapters(server.url),
        client.load_adapter(server.url, Path("/"), "run-a/000003"),
        client.unload_adapter(server.url, "run-a/000003"),
    ):
        await client.check_health(server.url)
        with pytest.raises(EngineUnavailable, match=r"is SGLang: runs with train\.lora_rank need vLLM"):
            await call
    assert "/generate" not in server.bodies


async def test_a_budget_beyond_the_context_is_cut_to_it(client: EngineClient, server: SglangServer) -> None:
    server.context_len = 5
    sampled = await generate(client, server.url, stop_ids=[])
    assert (sampled.ids, sampled.finish_reason) == ((100, 101), FinishReason.LENGTH)


async def test_a_full_context_is_told_apart(client: EngineClient, server: SglangServer) -> None:
    server.context_len = 3
    with pytest.raises(ContextOverflow, match="3 ids leave no room in a context of 3"):
        await generate(client, server.url)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_logprobs": None}, "2 ids but 0 log-probs"),
        (
            {"output_token_logprobs": [[-0.1, 512, None], [-0.5, 101, None]]},
            "id 100 was sampled, the log-prob is of 512",
        ),
        ({"weight_versions": None}, "no weight_versions: SGLang 0.5.23 or newer"),
        ({"weight_versions": [{"version": "run-a/000003", "start": 0, "end": 1}]}, "version spans cover 1 of 2"),
    ],
)
async def test_a_capture_that_is_not_whole_stops_the_episode(
    client: EngineClient, server: SglangServer, changes: dict[str, Any], message: str
) -> None:
    server.changes = changes
    with pytest.raises(EpisodeError, match=message) as caught:
        await generate(client, server.url)
    assert caught.value.outcome is Outcome.CAPTURE_INCOMPLETE


async def test_start_weights_are_unversioned(client: EngineClient, server: SglangServer) -> None:
    server.version = "default"
    with pytest.raises(Unversioned, match="'default'"):
        await generate(client, server.url)


async def test_top_p_is_refused_since_its_logprobs_leave_it_out(client: EngineClient, server: SglangServer) -> None:
    with pytest.raises(EpisodeError, match=r"top_p is 0\.9: engine .* is SGLang"):
        await generate(client, server.url, top_p=0.9)
    assert server.num_tokens == 0


async def test_weights_are_exchanged_between_pause_and_resume(client: EngineClient, server: SglangServer) -> None:
    url, path, name = server.url, Path("/weights/4"), "run-a/000004"
    await client.check_health(url)
    assert await client.weight_version(url) == "run-a/000003"
    assert not await client.is_paused(url)
    await client.pause(url)
    assert server.bodies["/pause_generation"] == {"mode": "retract"}
    assert await client.is_paused(url)
    await client.check_health(url)
    await client.load_version(url, path, name)
    await client.update_weight_version(url, name)
    assert server.bodies["/update_weight_version"] == {"new_version": name, "abort_all_requests": False}
    await client.resume(url)
    assert not await client.is_paused(url)
    assert (server.weights, await client.weight_version(url)) == ("/weights/4", name)


async def test_a_span_changes_where_the_weights_did(client: EngineClient, server: SglangServer) -> None:
    server.token_s = 0.02
    running = asyncio.create_task(generate(client, server.url, stop_ids=[]))
    await until(lambda: server.num_tokens >= 1)
    await client.update_weight_version(server.url, "run-a/000004")
    spans = (await running).spans
    assert [span.version for span in spans] == [3, 4]
    assert spans[-1].end == 3


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ("Failed to get weights iterator: no files in /weights/4.", LoadRefused),
        ("Failed to update weights: shape.\nRolling back to original weights.", EngineUnavailable),
        ("Weights were updated, but the cache was not flushed", EngineUnavailable),
    ],
)
async def test_only_a_refusal_before_the_first_weight_leaves_the_old_ones(
    client: EngineClient, server: SglangServer, refusal: str, kind: type[Exception]
) -> None:
    server.refusal = refusal
    with pytest.raises(kind) as caught:
        await client.load_version(server.url, Path("/weights/4"), "run-a/000004")
    assert type(caught.value) is kind


async def test_an_aborted_request_says_so_itself(client: EngineClient, server: SglangServer) -> None:
    await client.pause(server.url)
    task = asyncio.create_task(generate(client, server.url, request_id="r7"))
    await until(lambda: "/generate" in server.bodies)
    assert await client.abort(server.url, ["r7"]) is None
    assert (await task).finish_reason is FinishReason.ABORT
