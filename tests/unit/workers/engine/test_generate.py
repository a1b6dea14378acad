"""POST /inference/v1/generate: what it answers, what it refuses, and how a request ends early."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

ROUTE = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8]


async def test_the_answer_has_vllms_fields(client: Any) -> None:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 3, "seed": 1, "logprobs": 0, "ignore_eos": True},
        "request_id": "abc",
        "model": "tiny",
    }
    status, answer = await client.post(ROUTE, body)
    assert status == 200
    assert answer["request_id"] == "generate-tokens-abc"
    assert answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3}
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert len(choice["token_ids"]) == 3
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        alone = {key: entry[key] for key in ("token_id", "logprob", "rank")}
        assert entry["token_id"] == token_id
        assert entry["logprob"] < 0
        assert entry["rank"] >= 1
        assert entry["top_logprobs"] == [alone]


async def test_without_logprobs_there_are_none(client: Any) -> None:
    status, answer = await client.post(ROUTE, {"token_ids": PROMPT, "sampling_params": {}})
    assert status == 200
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] <= 16


async def test_a_stop_id_ends_the_request_and_is_its_last_token(client: Any) -> None:
    free = await client.generate(PROMPT, max_tokens=40, seed=4, ignore_eos=True)
    stop_id = free["token_ids"][11]
    first = free["token_ids"].index(stop_id)
    stopped = await client.generate(PROMPT, max_tokens=40, seed=4, ignore_eos=True, stop_token_ids=[stop_id])
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == stop_id
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert len(stopped["logprobs"]["content"]) == first + 1


async def test_the_end_of_sequence_id_ends_a_request_unless_ignored(client: Any, eos_prompt: list[int]) -> None:
    ended = await client.generate(eos_prompt, max_tokens=40, temperature=0)
    assert (ended["token_ids"], ended["finish_reason"], ended["stop_reason"]) == ([3], "stop", None)
    ignored = await client.generate(eos_prompt, max_tokens=5, temperature=0, ignore_eos=True)
    assert (ignored["token_ids"][0], len(ignored["token_ids"]), ignored["finish_reason"]) == (3, 5, "length")
    held = await client.generate(eos_prompt, max_tokens=40, temperature=0, min_tokens=4)
    assert 3 not in held["token_ids"][:4]
    assert len(held["token_ids"]) >= 5


async def test_an_answer_is_clipped_where_the_context_ends(small_client: Any) -> None:
    clipped = await small_client.generate([5] * 60, max_tokens=40, ignore_eos=True)
    assert (len(clipped["token_ids"]), clipped["finish_reason"]) == (4, "length")
    unlimited = await small_client.generate([5] * 4, max_tokens=None, ignore_eos=True)
    assert len(unlimited["token_ids"]) == 60


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"token_ids": [5, 576]}, 400, "Token id 576 is out of vocabulary: token_ids must be in 0..575"),
        ({"token_ids": [5, -1]}, 400, "Token id -1 is out of vocabulary"),
        ({"token_ids": []}, 400, "token_ids is empty"),
        ({"token_ids": [5] * 64}, 400, "the prompt has 64 tokens, but the maximum model length of 64"),
        ({"token_ids": "5"}, 400, "token_ids: Input should be a valid array (got 5)"),
        ({"token_ids": [True]}, 400, "token_ids.0: Input should be a valid integer (got True)"),
        ({"sampling_params": {"temprature": 1}}, 400, "sampling_params.temprature: Extra inputs"),
        ({"sampling_params": {"temperature": -0.1}}, 400, "sampling_params.temperature: Input should be greater"),
        ({"sampling_params": {"temperature": "1"}}, 400, "sampling_params.temperature: Input should be a valid"),
        ({"sampling_params": {"top_p": 0}}, 400, "sampling_params.top_p"),
        ({"sampling_params": {"min_p": 0.1}}, 400, "sampling_params.min_p"),
        ({"sampling_params": {"repetition_penalty": 1.05}}, 400, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "sampling_params.max_tokens"),
        ({"sampling_params": {"logprobs": 5}}, 400, "sampling_params.logprobs"),
        ({"sampling_params": {"stop_token_ids": [600]}}, 400, "stop_token_ids must be in 0..575"),
        ({"sampling_params": None}, 400, "sampling_params: Input should be an object"),
        ({"stream": True}, 400, "stream: Input should be False (got True)"),
        ({"model": "other"}, 404, "The model `other` does not exist; this engine serves `tiny`"),
    ],
    ids=str,
)
async def test_a_bad_request_is_told_what_is_wrong(
    change: dict[str, Any], status: int, told: str, small_client: Any
) -> None:
    found, answer = await small_client.post(ROUTE, {"token_ids": [5], "sampling_params": {}, **change})
    assert found == status
    assert told in answer["error"]["message"]
    assert answer["error"]["code"] == status


async def test_a_body_that_is_no_json_is_refused(client: Any) -> None:
    async with client.session.post(client.url + ROUTE, data=b"{") as answer:
        assert answer.status == 400
        assert "Invalid JSON" in (await answer.json())["error"]["message"]


async def test_64_requests_at_once_on_two_slots_are_all_answered(small_client: Any) -> None:
    alone = await small_client.generate([5] * 9, max_tokens=9, seed=9, ignore_eos=True)
    choices = await asyncio.gather(
        *(small_client.generate([5] * (i % 30 + 1), max_tokens=9, seed=i, ignore_eos=True) for i in range(64))
    )
    assert [len(choice["token_ids"]) for choice in choices] == [9] * 64
    assert choices[8 + 30]["token_ids"] != alone["token_ids"]
    again = await small_client.generate([5] * 9, max_tokens=9, seed=9, ignore_eos=True)
    assert again["token_ids"] == alone["token_ids"]


async def test_64_requests_at_once_give_what_each_gives_alone(client: Any) -> None:
    def request(i: int) -> Any:
        return client.generate([5 + i] * (i + 1), max_tokens=12, seed=i, ignore_eos=True)

    together = await asyncio.gather(*(request(i) for i in range(64)))
    for i in (0, 17, 63):
        alone = await request(i)
        assert together[i]["token_ids"] == alone["token_ids"]


async def test_abort_by_id_answers_with_what_was_sampled(client: Any) -> None:
    doomed = asyncio.create_task(client.generate(PROMPT, request_id="doomed", max_tokens=2000, ignore_eos=True))
    await client.wait_for("generation_tokens_total", lambda count: count >= 5)
    spared = asyncio.create_task(client.generate(PROMPT, request_id="spared", max_tokens=20, ignore_eos=True))
    assert await client.post("/abort_requests", {"request_ids": ["doomed", "unknown"]}) == (
        200,
        {"status": "aborted", "aborted": 1},
    )
    choice = await doomed
    assert choice["finish_reason"] == "abort"
    count = len(choice["token_ids"])
    assert 5 <= count < 2000
    assert len(choice["logprobs"]["content"]) == count
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert (await spared)["finish_reason"] == "length"


async def test_abort_with_no_ids_ends_running_and_queued_requests(small_client: Any) -> None:
    await small_client.post("/pause?mode=keep")
    tasks = [asyncio.create_task(small_client.generate(PROMPT, max_tokens=50)) for _ in range(3)]
    await small_client.wait_for("num_requests_waiting", lambda count: count == 3)
    assert await small_client.post("/abort_requests", {"request_ids": []}) == (
        200,
        {"status": "aborted", "aborted": 3},
    )
    for task in tasks:
        choice = await task
        assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])
        assert choice["logprobs"] == {"content": []}


async def test_the_engines_own_request_id_aborts_too(client: Any) -> None:
    await client.post("/pause?mode=keep")
    task = asyncio.create_task(client.generate(PROMPT, request_id="abc"))
    await client.wait_for("num_requests_waiting", lambda count: count == 1)
    _, answer = await client.post("/abort_requests", {"request_ids": ["generate-tokens-abc"]})
    assert answer["aborted"] == 1
    assert (await task)["finish_reason"] == "abort"


async def test_a_client_that_goes_away_frees_its_slot(client: Any) -> None:
    async with aiohttp.ClientSession() as leaver:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2000, "ignore_eos": True}}
        task = asyncio.create_task(leaver.post(client.url + ROUTE, json=body))
        await client.wait_for("num_requests_running", lambda count: count == 1)
        task.cancel()
    await client.wait_for("num_requests_running", lambda count: count == 0)
    assert await client.metric("generation_tokens_total") < 1900


async def test_models_health_and_metrics(client: Any) -> None:
    assert (await client.get("/health"))[0] == 200
    status, models = await client.get("/v1/models")
    assert (status, models["object"]) == (200, "list")
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("tiny", 2048)]
    await client.generate(PROMPT, max_tokens=7, ignore_eos=True)
    assert await client.metric("generation_tokens_total") == 7
    assert await client.metric("prompt_tokens_total") == 4
    assert await client.metric("num_requests_running") == 0
    assert await client.metric("kv_cache_usage_perc") == 0
    status, answer = await client.get("/nowhere")
    assert (status, answer["error"]["message"]) == (404, "Not Found")
