"""New weights in a running vLLM: complete for every kind of model, under load, and refused when they are broken."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from common.config import RunConfig
from common.db import engines, runs, versions
from common.db.session import Database
from common.episode import Sampled
from common.weight_cache import WeightCache
from common.weights import LOADING, MANIFEST, WeightStore, describe, version_name
from deploy.vllm import DEFAULT_PYTHON, VllmPlan, vllm_spec
from tests.unit.workers.waiting import until
from tests.vllm.serving import RUN, make_model, publish, serving
from trainer.engine_admin import EngineAdmin, TransferFailed
from trainer.modelling import load_model
from trainer.transfer import FolderTransport, hand_over
from workers.engine_client import EngineClient
from workers.engine_errors import LoadRefused
from workers.weight_keeper import WeightKeeper

PROMPTS = ([5, 20, 31, 44, 60], list(range(100, 140)), [7 + position % 400 for position in range(300)])
"""The last one fills blocks of the prefix cache, which must not outlive the weights."""
IN_FLIGHT = 32
NUM_UPDATES = 50
TOKENS_A_REQUEST = 120
MAX_DLOGPROB = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""Against float32. bfloat16 is off by rounding alone; weights of another version are off by several nats."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kind of model and of server."""

    tied: bool
    dtype: torch.dtype
    tensor_parallel: int = 1

    def __str__(self) -> str:
        ranks = f"-tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{'tied' if self.tied else 'untied'}-{str(self.dtype).removeprefix('torch.')}{ranks}"


VARIANTS = (
    Variant(tied=False, dtype=torch.float32),
    Variant(tied=True, dtype=torch.bfloat16),
    Variant(tied=False, dtype=torch.bfloat16),
    Variant(tied=True, dtype=torch.float32, tensor_parallel=2),
)


async def generate(
    client: EngineClient, url: str, prompt: Sequence[int], *, max_tokens: int = 16, temperature: float = 1e-6
) -> Sampled:
    """By default all but greedy: the answer shows the weights, and only them."""
    return await client.generate(
        url,
        request_id=uuid4().hex,
        prompt_ids=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        stop_ids=(),
        model=None,
        run=RUN,
    )


async def scores(url: str) -> list[list[float]]:
    """Log-probs of the prompts' own tokens and of greedy answers: bitwise the same for the same weights."""
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for prompt in PROMPTS:
            params = {"max_tokens": 16, "temperature": 0, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
            body = {"token_ids": list(prompt), "sampling_params": params}
            async with session.post(url + "/inference/v1/generate", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            choice = answer["choices"][0]
            row = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            given = zip(answer["prompt_logprobs"][1:], prompt[1:], strict=True)
            row += [entry[str(token)]["logprob"] for entry, token in given]
            rows.append([*choice["token_ids"], *row])
    return rows


async def load(client: EngineClient, url: str, path: Path, name: str) -> None:
    """The keeper's order of calls."""
    await client.pause(url)
    try:
        await client.load_version(url, path, name)
        await client.update_weight_version(url, name)
    finally:
        await client.resume(url)


def gap(model: PreTrainedModel, prompt: Sequence[int], sampled: Sampled, *, temperature: float) -> np.ndarray:
    """[T] distance between the engine's log-probs and those of `model` after the same ids."""
    ids = torch.tensor([[*prompt, *sampled.ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    own = logits.log_softmax(-1).gather(1, torch.tensor(sampled.ids)[:, None])[:, 0]
    return (own - torch.tensor(sampled.logprobs)).abs().numpy()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
async def test_every_tensor_is_exchanged(variant: Variant, tiny: Path, client: EngineClient, tmp_path: Path) -> None:
    """There and back again: bitwise what a fresh server gives, and in between what transformers computes."""
    store = WeightStore(tmp_path)
    old = publish(store, 0, make_model(seed=1, tied=variant.tied).type(variant.dtype), tokenizer=tiny).path
    new = publish(store, 1, make_model(seed=2, tied=variant.tied).type(variant.dtype), tokenizer=tiny).path
    dtype = str(variant.dtype).removeprefix("torch.")
    choices = {"dtype": dtype, "tensor_parallel": variant.tensor_parallel}
    with serving(old, log_file=tmp_path / "engine.log", **choices) as url:
        fresh = await scores(url)
        await load(client, url, new, version_name(RUN, 1))
        after = await scores(url)
        model = load_model(new)
        for prompt in PROMPTS:
            sampled = await generate(client, url, prompt, temperature=1.0)
            assert [(span.version, span.start, span.end) for span in sampled.spans] == [(1, 0, len(sampled.ids))]
            assert gap(model, prompt, sampled, temperature=1.0).max() < MAX_DLOGPROB[variant.dtype]
        await load(client, url, old, version_name(RUN, 0))
        assert await scores(url) == fresh
        assert after != fresh
        await official_update(url, new, "official")
        assert await scores(url) == after
        assert await client.weight_version(url) == "official"
        with pytest.raises(TransferFailed, match="/update_weights answers 500"):
            await official_update(url, tmp_path / "nowhere", "never")
        assert await scores(url) == after
        assert (await client.weight_version(url), await client.is_paused(url)) == (LOADING, False)


async def official_update(url: str, path: Path, name: str) -> None:
    """The trainer's order of calls: vLLM's own routes for weight updates, here over our backend."""
    await asyncio.to_thread(hand_over, EngineAdmin(url), FolderTransport(path), name=name, is_owned=lambda: True)


class Cycles(logging.Handler):
    """Collects how long the keeper's pause..resume took, from its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.took_ms: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("weights loaded") and isinstance(record.args, tuple):
            self.took_ms.append(float(str(record.args[-1])))


@pytest.fixture
def cycles() -> Iterator[Cycles]:
    handler, logger = Cycles(), logging.getLogger("workers.weight_keeper")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class Requests:
    """Sent to an engine one after another by each of several tasks, until `is_over` is set."""

    def __init__(self, client: EngineClient, url: str) -> None:
        self._client = client
        self._url = url
        self.num_asked = 0
        self.done: list[tuple[list[int], Sampled]] = []
        """Prompt and answer."""
        self.is_over = asyncio.Event()

    async def ask(self, number: int) -> None:
        count = 0
        while not self.is_over.is_set():
            prompt = [5 + number, 20 + count % 400, 31, 44, 60]
            self.num_asked += 1
            sampled = await generate(self._client, self._url, prompt, max_tokens=TOKENS_A_REQUEST, temperature=1.0)
            self.done.append((prompt, sampled))
            count += 1

    @property
    def num_straddling(self) -> int:
        """Answers with tokens of several versions."""
        return sum(len(sampled.spans) > 1 for _, sampled in self.done)

    def wrong_gaps(self, models: Mapping[int, PreTrainedModel]) -> list[float]:
        """For each span whose tokens are not of the version that it names, how far they are off."""
        return [
            gaps.max()
            for prompt, sampled in self.done
            for span in sampled.spans
            if (gaps := gap(models[span.version], prompt, sampled, temperature=1.0)[span.start : span.end]).max() > 1e-4
        ]


async def test_hot_load_under_load(
    engine: str,
    tiny: Path,
    client: EngineClient,
    database: Database,
    tmp_path: Path,
    cycles: Cycles,
    figures: dict[str, object],
) -> None:
    """No request is lost, every token's version is right, and the end is what a fresh server gives."""
    store, models = WeightStore(tmp_path), {}
    with database.begin() as conn:
        run = runs.open_run(conn, RunConfig(name=RUN, model=tiny))
        engines.register(conn, engine, run_id=run.id)
    keeper = WeightKeeper(database, client, owner="keeper", poll_s=0.2, cache=WeightCache(tmp_path))

    def publish_next(number: int) -> None:
        models[number] = shifted(load_model(tiny), seed=number)
        published = publish(store, number, models[number], tokenizer=tiny)
        with database.begin() as conn:
            versions.publish(conn, run.id, number, published)

    def served() -> int | None:
        with database.begin() as conn:
            rows = engines.serving(conn, run.id)
        return rows[0].version if rows else None

    requests = Requests(client, engine)
    publish_next(0)
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keeper.run())
        await until(lambda: served() == 0, within_s=60)
        asking = [tasks.create_task(requests.ask(number)) for number in range(IN_FLIGHT)]
        for number in range(1, NUM_UPDATES + 1):
            publish_next(number)
            keeper.announce()
            await until(lambda number=number: len(cycles.took_ms) > number, within_s=60)  # type: ignore[misc]
        await until(lambda: served() == NUM_UPDATES, within_s=60)
        requests.is_over.set()
        await asyncio.wait(asking)
        keeping.cancel()

    assert not await client.is_paused(engine)
    assert requests.num_asked == len(requests.done)
    assert requests.num_straddling
    assert requests.wrong_gaps(models) == []
    p50_ms = statistics.median(cycles.took_ms[1:])
    figures |= {
        "updates": NUM_UPDATES,
        "in_flight": IN_FLIGHT,
        "requests": len(requests.done),
        "straddling": requests.num_straddling,
        "lost": requests.num_asked - len(requests.done),
        "cycle_p50_ms": f"{p50_ms:.0f}",
    }
    assert len(cycles.took_ms) == NUM_UPDATES + 1
    final = await scores(engine)
    with serving(store.path(RUN, NUM_UPDATES), log_file=tmp_path / "fresh.log") as fresh:
        assert await scores(fresh) == final


def shifted(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Weights away from the start, far enough that a token of another version shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(folder, tensors)


def with_a_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(63)
    rewrite(folder, tensors)


def with_an_unknown_tensor(folder: Path) -> None:
    rewrite(folder, load_file(folder / "model.safetensors") | {"model.extra": torch.zeros(3)})


def with_another_dtype(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, {name: tensor.to(torch.float64) for name, tensor in tensors.items()})


def with_a_dtype_unlike_the_manifest(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    manifest = (folder / MANIFEST).read_bytes()
    rewrite(folder, {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    (folder / MANIFEST).write_bytes(manifest)


def with_a_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    rewrite(folder, tensors)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Other tensors, and a manifest that fits them: only the model can tell that they are wrong."""
    save_file(tensors, folder / "model.safetensors")
    (folder / MANIFEST).write_text(describe(folder).model_dump_json())


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def with_a_flipped_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def with_a_broken_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"files": []}))


def without_its_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


BROKEN: tuple[tuple[Callable[[Path], Any], str], ...] = (
    (without_a_tensor, "lacks 1 of .* first model.layers.1.mlp.up_proj.weight"),
    (with_a_wrong_shape, r"model.norm.weight has shape \(63,\), the model needs \(64,\)"),
    (with_an_unknown_tensor, "model.extra is not part of the model"),
    (with_another_dtype, "is F64, which a server in torch.float32 can't take"),
    (with_a_dtype_unlike_the_manifest, "BF16.*manifest.json says .*F32"),
    (with_a_nan, "model.norm.weight holds a NaN"),
    (cut_short, "has .* bytes, its header says"),
    (with_a_flipped_byte, "has sha256 .*, manifest.json says"),
    (with_a_broken_manifest, "is no manifest"),
    (without_its_files, "has no .*safetensors file"),
    (shutil.rmtree, "no folder"),
)


@pytest.mark.parametrize(("damage", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_broken_version_is_refused_and_the_old_weights_serve_on(
    damage: Callable[[Path], Any], message: str, engine: str, tiny: Path, client: EngineClient, tmp_path: Path
) -> None:
    folder = publish(WeightStore(tmp_path), 1, shifted(load_model(tiny), seed=1), tokenizer=tiny).path
    before = await scores(engine)
    damage(folder)
    with pytest.raises(LoadRefused, match=message):
        await load(client, engine, folder, "refused")
    assert await scores(engine) == before
    assert not await client.is_paused(engine)


def test_a_load_that_fails_half_way_goes_back_to_the_old_weights(tiny: Path, tmp_path: Path) -> None:
    version = publish(WeightStore(tmp_path), 1, shifted(load_model(tiny), seed=1), tokenizer=tiny).path
    spec = vllm_spec(VllmPlan(model=tiny, served_name="policy", port=1))
    done = subprocess.run(
        [DEFAULT_PYTHON, Path(__file__).parent / "half_way.py", tiny, version],
        env={**os.environ, **spec.env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"]["ok"] is False
    assert found["failed"]["error"].endswith("could not be loaded: OSError: the disk is gone")
    assert found["same_after_failure"] is True
    assert found["loaded"]["ok"] is True
    assert found["same_after_load"] is False
