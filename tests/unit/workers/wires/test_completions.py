"""vLLM without its generate route: the client falls back, remembers it, and names no version newer than the truth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.episode import FinishReason, Sampled, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.waiting import until
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow, EngineUnavailable, Unversioned
from workers.scripted_engine import ScriptedEngine
from workers.wires.base import GenerateRequest
from workers.wires.completions import COMPLETIONS, parse_completion
from workers.wires.vllm import GENERATE


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeout_s=5) as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(lambda prompt: [100 + len(prompt), 2, 3, 4])
    engine.version = "run-a/000003"
    engine.has_generate = False
    await engine.start()
    yield engine
    await engine.stop()


def request(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "request_id": "r1",
        "prompt_ids": [1, 2, 3],
        "max_tokens": 10,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop_ids": [3],
        "model": None,
        "run": "run-a",
    }
    return usual | changes


async def test_it_gives_what_the_generate_route_would(client: EngineClient, engine: ScriptedEngine) -> None:
    assert await client.generate(engine.url, **request()) == Sampled(
        ids=(103, 2, 3),
        logprobs=(-0.5, -0.5, -0.5),
        spans=(VersionSpan(version=3, start=0, end=3),),
        finish_reason=FinishReason.STOP,
    )


async def test_both_routes_are_told_all_that_a_server_may_have_a_default_for(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    plain = {
        "max_tokens": 10,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": True,
        "watermarking": False,
        "stop_token_ids": [3],
        "logprobs": 0,
    }
    await client.generate(engine.url, **request(temperature=0.7, top_p=0.9))
    assert engine.bodies[COMPLETIONS] == {
        "request_id": "r1",
        "prompt": [1, 2, 3],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **plain,
    }
    engine.has_generate = True
    async with EngineClient(timeout_s=5) as other:
        await other.generate(engine.url, **request(temperature=0.7, top_p=0.9))
    assert engine.bodies[GENERATE] == {"request_id": "r1", "token_ids": [1, 2, 3], "sampling_params": plain}


async def test_it_is_found_out_once_and_anew_after_a_failure(client: EngineClient, engine: ScriptedEngine) -> None:
    for _ in range(3):
        await client.generate(engine.url, **request())
    assert (engine.calls.count(GENERATE), engine.calls.count(COMPLETIONS)) == (1, 3)
    assert engine.calls.count("/v1/models") == 1
    engine.has_generate = True
    await engine.stop()
    with pytest.raises(Exception, match="Connect"):
        await client.generate(engine.url, **request())
    await engine.start()
    engine.calls.clear()
    await client.generate(engine.url, **request())
    assert engine.calls == [GENERATE]


async def test_a_budget_beyond_the_context_is_cut_to_it(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.max_model_len = 5
    sampled = await client.generate(engine.url, **request())
    assert (sampled.ids, sampled.finish_reason) == ((103, 2), FinishReason.LENGTH)


async def test_a_server_that_cuts_a_turn_is_told_from_one_whose_context_is_full(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    with pytest.raises(EpisodeError, match="ended a turn after 4 of 10 ids") as caught:
        await client.generate(engine.url, **request(stop_ids=[]))
    assert caught.value.outcome is Outcome.CAPTURE_INCOMPLETE


async def test_a_full_context_is_told_apart(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.max_model_len = 3
    with pytest.raises(ContextOverflow, match="3 ids leave no room in a context of 3"):
        await client.generate(engine.url, **request())


async def test_an_update_under_a_request_gives_all_its_ids_the_older_version(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    engine.token_s = 0.02
    task = asyncio.create_task(client.generate(engine.url, **request(max_tokens=4, stop_ids=[])))
    await until(lambda: engine.num_tokens >= 1)
    engine.version = "loading"
    await until(lambda: not engine.open)
    assert not task.done()
    engine.version = "run-a/000004"
    assert (await task).spans == (VersionSpan(version=3, start=0, end=4),)


@pytest.mark.parametrize("name", ["run-a/000002", "run-b/000004"])
async def test_other_weights_under_a_request_are_not_taken_for_ours(
    client: EngineClient, engine: ScriptedEngine, name: str
) -> None:
    engine.token_s = 0.02
    task = asyncio.create_task(client.generate(engine.url, **request()))
    await until(lambda: engine.num_tokens >= 1)
    engine.version = name
    with pytest.raises(Unversioned):
        await task


async def test_start_weights_are_unversioned(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.version = "default"
    with pytest.raises(Unversioned, match="'default'"):
        await client.generate(engine.url, **request())
    assert engine.num_tokens == 0


async def test_an_adapter_is_asked_for_by_name_and_is_the_version(client: EngineClient, engine: ScriptedEngine) -> None:
    engine.version = "default"
    await client.load_adapter(engine.url, Path("/"), "run-a/000005")
    sampled = await client.generate(engine.url, **request(adapter=5))
    assert (sampled.ids, sampled.spans) == ((103, 2, 3), (VersionSpan(version=5, start=0, end=3),))
    with pytest.raises(EngineUnavailable, match="The model `run-a/000006` does not exist"):
        await client.generate(engine.url, **request(adapter=6))


@pytest.mark.parametrize("name", ["loading", "run-a/000002"])
async def test_an_adapter_over_exchanged_weights_is_never_trained(
    client: EngineClient, engine: ScriptedEngine, name: str
) -> None:
    engine.version = "default"
    await client.load_adapter(engine.url, Path("/"), "run-a/000005")
    engine.token_s = 0.02
    task = asyncio.create_task(client.generate(engine.url, **request(adapter=5)))
    await until(lambda: engine.num_tokens >= 1)
    engine.version = name
    with pytest.raises(Unversioned, match=f"has weights {name} under adapter run-a/000005"):
        await task


def test_an_answer_of_another_model_than_the_adapter_is_never_trained() -> None:
    body = json.dumps({"model": "policy", "choices": []}).encode()
    asked = GenerateRequest(**request(adapter=5))
    with pytest.raises(Unversioned, match="sampled with 'policy', adapter run-a/000005 was asked for"):
        parse_completion(body, asked, version=5, engine="http://e")


async def test_abort_names_requests_as_this_route_does(client: EngineClient, engine: ScriptedEngine) -> None:
    await client.generate(engine.url, **request())
    engine.pause()
    task = asyncio.create_task(client.generate(engine.url, **request(request_id="r7")))
    await until(lambda: bool(engine.open))
    assert await client.abort(engine.url, ["r8"]) == 0
    assert await client.abort(engine.url, ["r7"]) == 1
    assert (await task).finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, "no ids, though return_token_ids was asked for"),
        ({"logprobs": None}, "2 ids but 0 log-probs"),
        (
            {"logprobs": {"tokens": ["token_id:7", "token_id:512"], "token_logprobs": [-1.0, -0.1]}},
            "at 1 id 8 was sampled, the log-prob is of 512",
        ),
        ({"logprobs": {"tokens": [" 7", " 8"], "token_logprobs": [-1.0, -2.0]}}, "the log-prob is of None"),
        ({"logprobs": {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [None, -2.0]}}, "at 0 is None"),
        ({"token_ids": [], "logprobs": None}, "no ids, though it finished by stop"),
    ],
)
def test_a_capture_that_is_not_whole_stops_the_episode(changes: dict[str, Any], message: str) -> None:
    choice = {
        "text": "",
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{}, {}]},
    } | changes
    body = json.dumps({"choices": [choice]}).encode()
    with pytest.raises(EpisodeError, match=message) as caught:
        parse_completion(body, GenerateRequest(**request()), version=3, engine="http://e")
    assert caught.value.outcome is Outcome.CAPTURE_INCOMPLETE
