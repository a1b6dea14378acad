"""LoRA versions on real vLLM: exact, side by side under load, and refused when they are broken."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs, versions
from common.db.engines import EngineRow, EngineStatus
from common.db.session import Database
from common.episode import Sampled
from common.weight_cache import WeightCache
from common.weights import WeightStore, version_name
from deploy.engine_probe import check_engine
from deploy.vllm import lora_plan
from tests.claims import make_claim
from tests.lora import make_adapted, publish_adapter
from tests.unit.workers.waiting import until
from tests.vllm.gate import Gate
from tests.vllm.serving import RUN, serving
from tests.vllm.test_hot_load import PROMPTS, gap
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable, LoadRefused
from workers.engine_pool import EnginePool
from workers.engine_reply import parse_sampled
from workers.weight_keeper import WeightKeeper
from workers.wires.vllm import GENERATE

pytestmark = pytest.mark.long

MAX_DLOGPROB = 1e-4
IN_FLIGHT = 16
NUM_VERSIONS = 10
LONG_TOKENS = 450
TRAIN = TrainConfig(lora_rank=8, max_staleness=1)


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on the demo's model, started for the adapters of the run."""
    log_file = tmp_path_factory.mktemp("vllm") / "engine.log"
    with serving(tiny, log_file=log_file, lora=lora_plan(TRAIN)) as url:
        yield url


class Scene:
    """A LoRA run, its keeper's database, and the pool that plays turns."""

    def __init__(self, database: Database, client: EngineClient, engine: str, tiny: Path, folder: Path) -> None:
        self.database = database
        self.tiny = tiny
        self.store = WeightStore(folder)
        self.models: dict[int, PreTrainedModel] = {}
        rollout = RolloutConfig(max_tokens_per_turn=60)
        with database.begin() as conn:
            self.run = runs.open_run(conn, RunConfig(name=RUN, model=tiny, rollout=rollout, train=TRAIN))
            engines.register(conn, engine, run_id=self.run.id)
        self.pool = EnginePool(client, self._rows, wait_s=60)
        self.keeper = WeightKeeper(database, client, owner="keeper", poll_s=0.2, cache=WeightCache(folder / "cache"))

    def _rows(self, run_id: int) -> list[EngineRow]:
        with self.database.begin() as conn:
            return engines.serving(conn, run_id)

    def publish(self, number: int, *, rank: int = 8) -> Path:
        self.models[number] = make_adapted(self.tiny, seed=number, rank=rank)
        published = publish_adapter(self.store, RUN, number, self.models[number])
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, number, published)
        return published.path

    @property
    def stored(self) -> EngineStatus:
        with self.database.begin() as conn:
            return engines.status(conn)[0]

    async def until_stored(self, number: int) -> None:
        await until(lambda: self.stored.version == number, within_s=60)

    async def turn(self, prompt: list[int], *, episode: int) -> Sampled:
        claim = make_claim(self.run.config, episode=episode, group=episode, run_id=self.run.id)
        return (await self.pool.generate(claim, prompt, request_id=uuid4().hex, stop_ids=())).sampled


async def generate(
    client: EngineClient, url: str, prompt: list[int], *, adapter: int, temperature: float = 1e-6
) -> Sampled:
    return await client.generate(
        url,
        request_id=uuid4().hex,
        prompt_ids=prompt,
        max_tokens=16,
        temperature=temperature,
        stop_ids=(),
        model=None,
        run=RUN,
        adapter=adapter,
    )


def behind_the_likeliest(model: PreTrainedModel, prompt: list[int], greedy: Sampled) -> float:
    """How far the logits of greedy ids are below the model's largest: 0 but for ties within rounding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *greedy.ids]])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(greedy.ids)[:, None])[:, 0]).max())


async def generate_long(url: str, prompt: list[int]) -> Sampled:
    """With version 0's adapter, and with no end before its budget is used up."""
    params = {"max_tokens": LONG_TOKENS, "logprobs": 0, "ignore_eos": True}
    body = {"model": version_name(RUN, 0), "token_ids": prompt, "sampling_params": params}
    async with aiohttp.ClientSession() as session, session.post(url + "/inference/v1/generate", json=body) as answer:
        return parse_sampled(await answer.read(), run=RUN, max_tokens=LONG_TOKENS, stop_ids=(), engine=url, adapter=0)


@pytest.fixture
def scene(database: Database, client: EngineClient, engine: str, tiny: Path, tmp_path: Path) -> Scene:
    return Scene(database, client, engine, tiny, tmp_path)


@pytest.fixture(params=[None, GENERATE], ids=["generate", "completions"])
async def address(request: pytest.FixtureRequest, engine: str) -> AsyncIterator[str]:
    """Of the server, or of what hides its generate route."""
    async with Gate(engine, shut=request.param) as gate:
        yield gate.url


async def test_an_adapter_samples_as_the_trainers_model_and_as_the_merged_one(
    address: str, client: EngineClient, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = WeightStore(tmp_path)
    for number in (90, 91):
        model = make_adapted(tiny, seed=number, rank=8)
        await client.load_adapter(address, publish_adapter(store, RUN, number, model).path, version_name(RUN, number))
        merged = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        for prompt in PROMPTS:
            greedy = await generate(client, address, prompt, adapter=number)
            sampled = await generate(client, address, prompt, adapter=number, temperature=1.0)
            for one in (model, merged):
                assert gap(one, prompt, sampled, temperature=1.0).max() < MAX_DLOGPROB
                assert behind_the_likeliest(one, prompt, greedy) < MAX_DLOGPROB
            assert [(span.version, span.start, span.end) for span in sampled.spans] == [(number, 0, len(sampled.ids))]
    assert gap(make_adapted(tiny, seed=90, rank=8), PROMPTS[-1], sampled, temperature=1.0).max() > 0.1
    assert client.wire(address) == f"vllm-{request.node.callspec.id}"
    for number in (90, 91):
        await client.unload_adapter(address, version_name(RUN, number))
    with pytest.raises(EngineUnavailable, match=f"The model `{version_name(RUN, 90)}` does not exist"):
        await generate(client, address, PROMPTS[0], adapter=90)


async def test_versions_under_load(scene: Scene, engine: str, client: EngineClient, figures: dict[str, object]) -> None:
    """No request is lost, every token's version is right, nothing stays beyond the window, nothing in use goes."""
    done: list[tuple[list[int], Sampled]] = []
    is_over = asyncio.Event()

    async def ask(number: int) -> None:
        while not is_over.is_set():
            prompt = [5, 20 + number]
            done.append((prompt, await scene.turn(prompt, episode=number)))

    async def until_done(num: int) -> None:
        await until(lambda: len(done) >= num, within_s=60)

    scene.publish(0)
    keeping = asyncio.create_task(scene.keeper.run())
    await scene.until_stored(0)
    long = asyncio.create_task(generate_long(engine, [5, 19]))
    asking = [asyncio.create_task(ask(number)) for number in range(IN_FLIGHT)]
    num_kept = 0
    for number in range(1, NUM_VERSIONS + 1):
        await until_done(len(done) + IN_FLIGHT // 2)
        scene.publish(number)
        scene.keeper.announce()
        await scene.until_stored(number)
        held, in_use = await client.adapters(engine), await client.adapters_in_use(engine)
        assert version_name(RUN, number) in held
        if not long.done():
            num_kept = number
            assert version_name(RUN, 0) in held
        assert in_use <= held.keys()
    await until(lambda: done[-1][1].spans[0].version == NUM_VERSIONS, within_s=60)
    is_over.set()
    await asyncio.gather(*asking)
    done.append(([5, 19], await long))
    scene.publish(NUM_VERSIONS + 1)
    wanted = {version_name(RUN, NUM_VERSIONS + 1 - back) for back in range(3)}
    async with asyncio.timeout(30):
        while set(await client.adapters(engine)) != wanted:  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.05)
    keeping.cancel()
    await asyncio.wait([keeping])

    gaps, seen = [np.zeros(1)], set[int]()
    for prompt, sampled in done:
        (span,) = sampled.spans
        seen.add(span.version)
        gaps.append(gap(scene.models[span.version], prompt, sampled, temperature=1.0))
    figures["lora_requests"], figures["lora_dlogprob_max"] = len(done), f"{np.concatenate(gaps).max():.1e}"
    figures["lora_old_kept_until"] = num_kept
    assert np.concatenate(gaps).max() < MAX_DLOGPROB
    assert seen == set(range(NUM_VERSIONS + 1))
    assert len(done[-1][1].ids) == LONG_TOKENS


async def test_broken_adapters_leave_the_old_one_serving(scene: Scene, engine: str, client: EngineClient) -> None:
    with pytest.raises(LoadRefused, match="/nowhere"):
        await client.load_adapter(engine, Path("/nowhere"), version_name(RUN, 50))
    cut = scene.publish(51) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(LoadRefused, match=r"refuses adapter vllm-test/000051 \(500\)"):
        await client.load_adapter(engine, cut.parent, version_name(RUN, 51))

    scene.publish(60)
    keeping = asyncio.create_task(scene.keeper.run())
    await until(lambda: scene.stored.version == 60, within_s=30)
    scene.publish(61, rank=16)
    await until(lambda: scene.stored.error is not None, within_s=30)
    assert "LoRA rank 16 is greater than max_lora_rank 8" in (scene.stored.error or "")
    assert scene.stored.version == 60
    sampled = await generate(client, engine, PROMPTS[0], adapter=60, temperature=1.0)
    assert gap(scene.models[60], PROMPTS[0], sampled, temperature=1.0).max() < MAX_DLOGPROB
    scene.publish(62)
    await until(lambda: scene.stored.version == 62, within_s=30)
    assert scene.stored.error is None
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_the_probe_tells_a_server_with_adapters(engine: str, tiny: Path) -> None:
    await asyncio.to_thread(check_engine, engine, model=tiny, served_name="policy", lora=True)
