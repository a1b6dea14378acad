"""The pool over two real engines and a slow one: load goes where there is room, and prompts where their cache is."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from uuid import uuid4

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from common.config import RolloutConfig, RunConfig
from common.db.engines import EngineRow
from common.episode import EngineState
from common.weights import version_name
from tests.claims import make_claim
from tests.vllm.serving import RUN, serving
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool

NUM_GROUPS = 12
GROUP_SIZE = 4
NUM_TURNS = 4
AT_ONCE = 24
"""Episodes under way: more than one engine decodes at once."""
MAX_NUM_SEQS = 16
GROUP_PROMPT = 512
"""Tokens that siblings share: four blocks of the cache."""
SUFFIX = 100
MAX_TOKENS = 28
SLOW_S = 2.0
MIN_HIT_SHARE = 0.9
FIRST_ID, NUM_IDS = 10, 500
CONTEXT = 2048
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Engines:
    """URLs; the slow one is a way to `second` that takes SLOW_S longer."""

    first: str
    second: str


@pytest.fixture(scope="module")
def engines(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("router")
    model = Path(shutil.copytree(tiny, folder / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    with (
        serving(model, log_file=folder / "first.log", max_num_seqs=MAX_NUM_SEQS) as first,
        serving(model, log_file=folder / "second.log", max_num_seqs=MAX_NUM_SEQS) as second,
    ):
        yield Engines(first=first, second=second)


@asynccontextmanager
async def slowed(url: str) -> AsyncIterator[str]:
    """URL of a server that passes generate requests on, late."""

    async def pass_on(request: web.Request) -> web.Response:
        await asyncio.sleep(SLOW_S)
        async with session.post(url + request.path, data=await request.read(), headers=HEADERS) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", pass_on)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Episodes:
    """The same episodes each time; only what is sampled differs."""

    def __init__(self, pool: EnginePool, model: Path) -> None:
        rollout = RolloutConfig(max_tokens_per_turn=MAX_TOKENS, group_size=GROUP_SIZE)
        self.config = RunConfig(name=RUN, model=model, rollout=rollout)
        self.pool = pool
        self.engines_of: dict[int, list[str]] = {}
        """Episode -> the engine of each turn."""
        self._places = asyncio.Semaphore(AT_ONCE)

    async def play_all(self) -> None:
        await asyncio.gather(*(self._play(number) for number in range(NUM_GROUPS * GROUP_SIZE)))

    async def _play(self, number: int) -> None:
        group = number // GROUP_SIZE
        claim = make_claim(self.config, episode=number, group=group)
        prompt = some_ids(f"group {group}", GROUP_PROMPT)
        async with self._places:
            for turn in range(NUM_TURNS):
                prompt += some_ids(f"episode {number} turn {turn}", SUFFIX)
                generated = await self.pool.generate(claim, prompt, request_id=uuid4().hex, stop_ids=())
                prompt += generated.sampled.ids
                self.engines_of.setdefault(number, []).append(generated.engine)

    @property
    def num_requests(self) -> Counter[str]:
        """By engine."""
        return Counter(url for urls in self.engines_of.values() for url in urls)

    @property
    def share_with_siblings(self) -> float:
        """First turns on the engine that most of their group's went to."""
        together = 0
        for group in range(NUM_GROUPS):
            firsts = Counter(self.engines_of[group * GROUP_SIZE + index][0] for index in range(GROUP_SIZE))
            together += max(firsts.values())
        return together / (NUM_GROUPS * GROUP_SIZE)

    @property
    def share_at_home(self) -> float:
        """Turns on the engine of the turn before."""
        pairs = [pair for urls in self.engines_of.values() for pair in pairwise(urls)]
        return sum(before == after for before, after in pairs) / len(pairs)


def some_ids(name: str, num: int) -> list[int]:
    random = Random(name)
    return [FIRST_ID + random.randrange(NUM_IDS) for _ in range(num)]


async def play(client: EngineClient, urls: list[str], model: Path) -> tuple[Episodes, float]:
    """All episodes on these engines, and the share of their prompts' tokens that the prefix caches had."""
    real = [url for url in urls if await client.metrics(url)]
    async with aiohttp.ClientSession() as session:
        for url in real:
            await client.update_weight_version(url, version_name(RUN, 0))
            async with session.post(url + "/reset_prefix_cache") as answer:
                assert (await answer.json())["success"] is True
    rows = [
        EngineRow(id=number, url=url, run_id=1, state=EngineState.SERVING, version=0) for number, url in enumerate(urls)
    ]
    before = [await cache_counts(client, url) for url in real]
    episodes = Episodes(EnginePool(client, lambda run_id: rows, wait_s=120), model)
    watch = asyncio.create_task(episodes.pool.watch_pressure(every_s=0.5))
    await episodes.play_all()
    watch.cancel()
    after = [await cache_counts(client, url) for url in real]
    hits, queries = (
        sum(new[part] - old[part] for new, old in zip(after, before, strict=True)) for part in ("hits", "queries")
    )
    return episodes, hits / queries


async def cache_counts(client: EngineClient, url: str) -> dict[str, float]:
    """Tokens asked for, and found, since the engine's start."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(await client.metrics(url))
        for sample in family.samples
    }
    return {part: samples[f"vllm:prefix_cache_{part}_total"] for part in ("hits", "queries")}


@pytest.mark.timeout(540)
@pytest.mark.long
async def test_load_goes_where_there_is_room_and_prompts_where_their_cache_is(
    engines: Engines, client: EngineClient, tiny: Path, figures: dict[str, object]
) -> None:
    _, alone = await play(client, [engines.first], tiny)
    async with slowed(engines.second) as slow:
        episodes, together = await play(client, [engines.first, engines.second, slow], tiny)
    requests = episodes.num_requests
    figures["router_requests"] = "/".join(str(requests[url]) for url in (engines.first, engines.second, slow))
    figures["router_siblings_together"] = f"{episodes.share_with_siblings:.2f}"
    figures["router_turns_at_home"] = f"{episodes.share_at_home:.2f}"
    figures["router_hit_rate"] = f"{together:.3f}"
    figures["router_hit_rate_of_one"] = f"{alone:.3f}"
    assert sum(requests.values()) == NUM_GROUPS * GROUP_SIZE * NUM_TURNS
    assert 0 < 2 * requests[slow] < min(requests[engines.first], requests[engines.second])
    assert episodes.share_with_siblings >= 0.7
    assert episodes.share_at_home >= 0.9
    assert alone > 0.5
    assert together >= MIN_HIT_SHARE * alone
