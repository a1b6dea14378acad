"""What a server must answer before it is given to a run."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.config import TINY_MODELS
from common.errors import SetupError
from common.sampling import VLLM_PLAIN
from deploy.engine_ask import MAX_ANSWER_BYTES, EngineKind
from deploy.engine_probe import NO_FOLDER, ONE_TOKEN, check_engine, num_requests
from deploy.engine_sampling import COMPLETIONS, GENERATE
from deploy.engine_serve import wait_until_idle
from deploy.ports import free_port

MODEL = TINY_MODELS / "tiny-calculator"
METRICS = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\nother 7\n'


@dataclass
class Stub:
    """A server that answers as an engine does, but for what a test changes."""

    vocab_size: int = 576
    processed_logprobs: bool = True
    prompt_logprob: float | None = -1.0
    """Of each id of a prompt; None = it does not say them."""
    has_completions: bool = False
    max_new_tokens: int = 100
    """What it cuts each request to."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """How each request was to be sampled."""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    vocab_answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Answers to prompts of ids of the vocabulary."""
    url: str = ""

    async def respond(self, request: web.Request) -> web.Response:
        body = await request.read()
        default: dict[str, Callable[[Any], tuple[int, Any]]] = {
            "/health": lambda _: (200, ""),
            "/weight_info": lambda _: (200, {"weight_version": "default"}),
            "/is_paused": lambda _: (200, {"is_paused": False}),
            "/v1/models": lambda _: (200, {"data": [{"id": "policy"}]}),
            GENERATE: self.generate,
            "/collective_rpc": lambda _: (200, {"results": [{"ok": False, "error": "no folder"}]}),
            "/metrics": lambda _: (200, METRICS),
        }
        if self.has_completions:
            default[COMPLETIONS] = self.complete
        if request.path in self.vocab_answers and json.loads(body)["prompt"][0] < self.vocab_size:
            status, answer = self.vocab_answers[request.path]
        elif request.path in self.answers:
            status, answer = self.answers[request.path]
        elif request.path in default:
            status, answer = default[request.path](json.loads(body or b"null"))
        else:
            status, answer = 404, "no such route"
        return web.Response(status=status, text=answer if isinstance(answer, str) else json.dumps(answer))

    def generate(self, body: Any) -> tuple[int, Any]:
        prompt, params = body["token_ids"], body["sampling_params"]
        self.asked.append(params)
        if max(prompt) >= self.vocab_size:
            return 400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}}
        logprob = 0.0 if self.processed_logprobs and params.get("top_p", 1.0) < 1e-3 else -1.0
        ids = [1] * min(params["max_tokens"], self.max_new_tokens)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": token_id, "logprob": logprob} for token_id in ids]},
            "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        }
        entries = [{str(token_id): {"logprob": self.prompt_logprob}} for token_id in prompt[1:]]
        says = "prompt_logprobs" in params and self.prompt_logprob is not None
        return 200, {"choices": [choice], "prompt_logprobs": [None, *entries] if says else None}

    def complete(self, body: Any) -> tuple[int, Any]:
        status, reply = self.generate({"token_ids": body["prompt"], "sampling_params": body})
        if status == 200:
            (choice,) = reply["choices"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            choice["logprobs"] = {"token_logprobs": logprobs}
            choice["prompt_logprobs"] = reply.pop("prompt_logprobs")
        return status, reply


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    stub = Stub()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.respond)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


async def check(stub: Stub, **rest: Any) -> EngineKind:
    return await asyncio.to_thread(check_engine, stub.url, model=MODEL, served_name="policy", **rest)


async def test_an_engine_that_can_do_all_passes(stub: Stub) -> None:
    assert await check(stub) is EngineKind.VLLM
    assert await check(stub, temperature=0.7, top_p=0.9) is EngineKind.VLLM


def completion(**changes: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [0.0]}} | changes]}


async def test_a_server_without_the_generate_route_is_asked_for_completions(stub: Stub) -> None:
    stub.answers[GENERATE] = (403, {"error": {"message": "Scale-out endpoints are disabled."}})
    stub.has_completions = True
    assert await check(stub, temperature=0.7) is EngineKind.VLLM_COMPLETIONS
    for changes in ({"token_ids": None}, {"logprobs": None}, {"token_ids": [1, 2]}):
        stub.vocab_answers[COMPLETIONS] = completion(**changes)
        with pytest.raises(SetupError, match="/v1/completions answers 200 without id and log-prob"):
            await check(stub)


async def test_logprobs_of_another_distribution_are_refused_where_it_matters(stub: Stub) -> None:
    stub.processed_logprobs = False
    assert await check(stub) is EngineKind.VLLM
    for sampling in ({"temperature": 0.7}, {"top_p": 0.9}):
        with pytest.raises(SetupError, match="start vLLM with --logprobs-mode processed_logprobs"):
            await check(stub, **sampling)


@pytest.mark.parametrize("has_generate", [True, False])
async def test_a_server_that_changes_its_models_distribution_is_refused(stub: Stub, has_generate: bool) -> None:
    if not has_generate:
        stub.has_completions = True
        stub.answers[GENERATE] = (403, {"error": {"message": "Scale-out endpoints are disabled."}})
    for logprob in (-1.05, -0.95, None):
        stub.prompt_logprob = logprob
        await check(stub)
    stub.prompt_logprob = -2.5
    with pytest.raises(SetupError, match=r"changes what it samples from: .* off its model's own by 1\.5 nats"):
        await check(stub)
    assert all(asked.items() >= {**VLLM_PLAIN, "temperature": 1.0}.items() for asked in stub.asked)
    assert {asked["top_p"] for asked in stub.asked} == {ONE_TOKEN, 1.0}


async def test_a_server_that_cuts_what_was_asked_for_is_refused(stub: Stub) -> None:
    stub.max_new_tokens = 7
    with pytest.raises(SetupError, match="ends after 7 ids where 24 are asked for: start it without a max_new_tokens"):
        await check(stub)


async def test_sglang_is_told_apart(stub: Stub) -> None:
    info = {"output_token_logprobs": [[-1.0, 5, None]], "weight_versions": [{"version": "d", "start": 0, "end": 1}]}
    stub.answers |= {
        "/weight_info": (404, {"detail": "Not Found"}),
        "/model_info": (200, {"weight_version": "default"}),
        "/ready": (200, ""),
        "/generate": (200, {"output_ids": [5], "meta_info": info}),
        "/collective_rpc": (404, {"detail": "Not Found"}),
    }
    assert await check(stub, temperature=0.7) is EngineKind.SGLANG
    with pytest.raises(SetupError, match=r"set rollout\.top_p = 1, it is 0\.9"):
        await check(stub, top_p=0.9)
    with pytest.raises(SetupError, match=r"is SGLang: the run trains an adapter \(train\.lora_rank\)"):
        await check(stub, lora=True)
    stub.answers["/generate"] = (200, {"output_ids": [5], "meta_info": {}})
    with pytest.raises(SetupError, match="without id, log-prob and weight_versions"):
        await check(stub)
    stub.answers["/ready"] = (503, "")
    with pytest.raises(SetupError, match="is starting up or paused"):
        await check(stub)


async def test_a_web_server_is_no_engine(stub: Stub) -> None:
    stub.answers = dict.fromkeys(("/weight_info", "/health", "/v1/models"), (404, "<html>\n<h1>Not found</h1>"))
    with pytest.raises(SetupError, match=f"{stub.url} answers, but is no engine"):
        await check(stub)


async def test_an_answer_without_end_is_given_up(stub: Stub) -> None:
    stub.answers["/weight_info"] = (200, "x" * (MAX_ANSWER_BYTES + 100_000))
    with pytest.raises(SetupError, match="does not end its answer"):
        await check(stub)


async def test_a_model_with_fewer_rows_than_its_tokenizer_has_ids_is_refused(stub: Stub, tmp_path: Path) -> None:
    small = shutil.copytree(MODEL, tmp_path / "small")
    config = (small / "config.json").read_text()
    (small / "config.json").write_text(config.replace('"vocab_size": 576', '"vocab_size": 256'))
    with pytest.raises(SetupError, match=r"its tokenizer has ids up to \d+, its embeddings 256 rows"):
        await asyncio.to_thread(check_engine, stub.url, model=small, served_name="policy")


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/health", (503, ""), "is not healthy: /health answers 503"),
        ("/weight_info", (404, "Not Found"), "is no vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1"),
        ("/weight_info", (200, "<html>"), "has no /weight_info"),
        ("/is_paused", (200, {"is_paused": True}), "is paused: resume it first"),
        ("/v1/models", (200, {"data": [{"id": "qwen"}]}), "serves qwen, not policy: .* --model-name qwen"),
        ("/inference/v1/generate", (403, {"error": "off"}), "start vLLM with --enable-scale-out"),
        ("/inference/v1/generate", (200, {"choices": [{"token_ids": [1]}]}), "without id, log-prob and weight version"),
        ("/tokenize", (200, {"tokens": [1, 2, 3]}), "another tokenizer"),
        ("/collective_rpc", (500, {"error": "no method"}), "--worker-extension-cls rollmill_vllm.WorkerExtension"),
    ],
)
async def test_what_is_missing_is_named(stub: Stub, path: str, answer: tuple[int, Any], message: str) -> None:
    stub.answers[path] = answer
    with pytest.raises(SetupError, match=message) as caught:
        await check(stub)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        (404, {"detail": "Not Found"}),
        (500, {"error": {"message": "LoRA is not enabled.", "code": 500}}),
        (200, "Success: LoRA adapter 'rollmill-probe' added successfully."),
    ],
)
async def test_a_server_without_adapters_is_told_how_to_get_them(stub: Stub, answer: tuple[int, Any]) -> None:
    stub.answers["/v1/load_lora_adapter"] = answer
    with pytest.raises(SetupError, match=r"cannot load LoRA adapters \(status .* start vLLM with --enable-lora"):
        await check(stub, lora=True)


async def test_a_server_of_adapters_need_not_load_whole_models(stub: Stub) -> None:
    stub.answers["/v1/load_lora_adapter"] = (404, {"error": {"message": f"No adapter found for {NO_FOLDER}"}})
    stub.answers["/collective_rpc"] = (500, {"error": "no method"})
    await check(stub, lora=True)


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [(512, "does not know token id 575, the run's model does"), (600, "it knows token id 576, and the ids of")],
)
async def test_another_vocabulary_is_refused(stub: Stub, vocab_size: int, message: str) -> None:
    stub.vocab_size = vocab_size
    with pytest.raises(SetupError, match=message):
        await check(stub)


def test_nobody_at_the_address_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SetupError, match=f"^no engine answers at {url}/weight_info: .*refused"):
        check_engine(url, model=MODEL, served_name="policy")


async def test_a_server_of_another_protocol_is_refused() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(SetupError, match="does not speak HTTP: BadStatusLine"):
        await asyncio.to_thread(check_engine, url, model=MODEL, served_name="policy")
    server.close()


async def test_a_context_shorter_than_the_run_needs_is_refused(stub: Stub) -> None:
    def tell(context: int) -> None:
        adapter = {"id": "adapter", "parent": "policy", "max_model_len": None}
        stub.answers["/v1/models"] = (200, {"data": [{"id": "policy", "max_model_len": context}, adapter]})

    tell(60)
    for max_row_tokens, words in (
        (None, f"context of 60 ids and the run needs 512, the context of model {MODEL}: .* --max-model-len 512, or "),
        (
            61,
            "context of 60 ids and the run needs 61, its rollout.max_row_tokens: .* set rollout.max_row_tokens to 60 ",
        ),
    ):
        with pytest.raises(SetupError, match=f"^engine {stub.url} has a {words}"):
            await check(stub, max_row_tokens=max_row_tokens)
    assert await check(stub, max_row_tokens=60) is EngineKind.VLLM
    tell(512)
    assert await check(stub) is EngineKind.VLLM


async def test_draining_waits_for_requests_and_gives_up_at_the_deadline(stub: Stub) -> None:
    assert await asyncio.to_thread(num_requests, stub.url) == 3
    assert await asyncio.to_thread(wait_until_idle, stub.url, timeout_s=0.3) == 3
    waiting = asyncio.ensure_future(asyncio.to_thread(wait_until_idle, stub.url, timeout_s=20))
    stub.answers["/metrics"] = (200, METRICS.replace("2.0", "0.0").replace("1.0", "0.0"))
    assert await waiting == 0
