"""Tiny random Qwen3 checkpoints, transformers' own log-probs for them, and an engine on a free loopback port."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from transformers import LogitsProcessorList, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common.weights import WeightStore
from workers.engine.__main__ import Engine, build
from workers.engine.sampling import SamplingParams

DEADLINE_S = 20.0
EOS_ID = 3


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", name="make_checkpoint")
def _make_checkpoint() -> Callable[..., Path]:
    return make_checkpoint


def make_checkpoint(folder: Path, *, seed: int, **changes: Any) -> Path:
    """A random model of the demo's shape in float16, peaked enough that a wrong position shows."""
    shape: dict[str, Any] = {
        "vocab_size": 576,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.12,
        "eos_token_id": EOS_ID,
    }
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes})).half()
    torch.set_rng_state(generator_state)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that engines start with."""
    return make_checkpoint(tmp_path_factory.mktemp("base"), seed=1)


@pytest.fixture(scope="session")
def version_7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape, published as a policy version with a manifest."""
    folder = make_checkpoint(tmp_path_factory.mktemp("trained"), seed=2)

    def write(draft: Path) -> None:
        shutil.copytree(folder, draft, dirs_exist_ok=True)

    return WeightStore(tmp_path_factory.mktemp("weights")).publish("run", 7, write).path


@dataclass
class Reference:
    """transformers' answer to: under which distribution does the next token of `ids` stand?"""

    models: dict[Path, Qwen3ForCausalLM] = field(default_factory=dict)

    @torch.inference_mode()
    def logprobs_TV(self, folder: Path, ids: Sequence[int], params: SamplingParams, *, start: int) -> torch.Tensor:
        """Log-probs (T, V) of the sampling distributions of ids[start:], all in one forward pass."""
        logits = self._model(folder)(torch.tensor([list(ids)])).logits[0, start - 1 : -1].float()
        warpers = LogitsProcessorList()
        if params.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        return torch.log_softmax(warpers(torch.LongTensor(), logits), dim=-1)

    def _model(self, folder: Path) -> Qwen3ForCausalLM:
        if folder not in self.models:
            model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            self.models[folder] = model.eval()
        return self.models[folder]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def eos_prompt(base: Path, reference: Reference) -> list[int]:
    """A prompt after which the base checkpoint finds the end of sequence likeliest."""
    for token_id in range(4, 576):
        for other_id in range(4, 576, 25):
            ids = [token_id, other_id, EOS_ID]
            if int(reference.logprobs_TV(base, ids, SamplingParams(), start=2)[0].argmax()) == EOS_ID:
                return ids[:2]
    raise AssertionError("no prompt of two tokens leads to the end of sequence")


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """Starts engines' decoding threads without HTTP, and stops them after the test."""
    started: list[Engine] = []

    def start(folder: Path, *, max_batch: int = 64, max_model_len: int | None = None) -> Engine:
        engine = build(folder, model_name="tiny", max_batch=max_batch, max_model_len=max_model_len)
        engine.decoding.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        assert engine.decoding.stop(timeout_s=DEADLINE_S)


@dataclass
class Client:
    """Speaks to an engine over HTTP as vLLM's clients do."""

    url: str
    session: aiohttp.ClientSession
    engine: Engine

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.text()

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def generate(self, ids: Sequence[int], *, request_id: str | None = None, **params: Any) -> Any:
        """The choice of a request that must succeed, with log-probs."""
        body = {"token_ids": list(ids), "sampling_params": {"logprobs": 0, **params}, "request_id": request_id}
        status, answer = await self.post("/inference/v1/generate", body)
        assert status == 200, answer
        return answer["choices"][0]

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        line = next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))
        return float(line.rpartition(" ")[2])

    async def wait_for(self, name: str, reached: Callable[[float], bool]) -> None:
        """Wait until a metric is as wanted."""
        deadline = time.monotonic() + DEADLINE_S
        while not reached(value := await self.metric(name)):
            assert time.monotonic() < deadline, f"{name} is still {value}"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(folder: Path, **sizes: int) -> AsyncIterator[Client]:
    engine = build(
        folder,
        model_name="tiny",
        max_batch=sizes.get("max_batch", 16),
        max_model_len=sizes.get("max_model_len"),
    )
    runner = web.AppRunner(engine.routes.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    engine.decoding.start()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield Client(url=f"http://{host}:{port}", session=session, engine=engine)
    finally:
        assert await asyncio.to_thread(engine.decoding.stop, timeout_s=DEADLINE_S)
        await runner.cleanup()


@pytest.fixture
async def client(base: Path) -> AsyncIterator[Client]:
    """A client of a fresh engine on the base checkpoint."""
    async with serving(base) as connected:
        yield connected


@pytest.fixture
async def small_client(base: Path) -> AsyncIterator[Client]:
    """The same with two slots and a context of 64."""
    async with serving(base, max_batch=2, max_model_len=64) as connected:
        yield connected
