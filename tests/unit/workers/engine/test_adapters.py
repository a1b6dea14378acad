"""LoRA adapters of the small engine: side by side in one batch, each exactly its own model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from common.episode import Sampled
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST, WeightStore, version_name
from tests.lora import make_adapted, publish_adapter
from workers.engine_client import EngineClient
from workers.engine_errors import EngineUnavailable, LoadRefused

RUN = "run-a"
PROMPTS = [[5 + number, *range(20, 20 + 7 * number)] for number in range(6)]
MAX_DLOGPROB = 1e-4


@pytest.fixture
async def wire() -> AsyncIterator[EngineClient]:
    async with EngineClient(timeout_s=20) as wire:
        yield wire


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[PreTrainedModel, Path]]:
    store = WeightStore(tmp_path_factory.mktemp("weights"))
    models = {number: make_adapted(base, seed=number) for number in range(3)}
    return {number: (model, publish_adapter(store, RUN, number, model).path) for number, model in models.items()}


async def generate(
    wire: EngineClient, url: str, prompt: list[int], *, adapter: int | None, max_tokens: int = 24
) -> Sampled:
    return await wire.generate(
        url,
        request_id=uuid4().hex,
        prompt_ids=prompt,
        max_tokens=max_tokens,
        temperature=1.0,
        stop_ids=(),
        model=None,
        run=RUN,
        adapter=adapter,
    )


def gap(model: PreTrainedModel, prompt: list[int], sampled: Sampled) -> float:
    """Largest distance to the log-probs of the model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *sampled.ids]])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(sampled.ids)[:, None])[:, 0]
    return float((own - torch.tensor(sampled.logprobs)).abs().max())


async def test_adapters_and_the_engines_own_weights_share_a_batch_and_each_is_its_own_model(
    client: Any, wire: EngineClient, versions: dict[int, tuple[PreTrainedModel, Path]]
) -> None:
    for number, (_, path) in versions.items():
        await wire.load_adapter(client.url, path, version_name(RUN, number))
    assert await wire.adapters(client.url) == {version_name(RUN, n): str(path) for n, (_, path) in versions.items()}
    await client.post("/update_weight_version", {"new_version": version_name(RUN, 9)})
    own = asyncio.gather(*(generate(wire, client.url, prompt, adapter=None) for prompt in PROMPTS))
    assert [span.version for sampled in await own for span in sampled.spans] == [9] * len(PROMPTS)
    await client.post("/update_weight_version", {"new_version": "default"})
    asked = [(number, prompt) for prompt in PROMPTS for number in versions]
    answers = await asyncio.gather(*(generate(wire, client.url, prompt, adapter=n) for n, prompt in asked))
    for (number, prompt), sampled in zip(asked, answers, strict=True):
        assert [(span.version, span.start, span.end) for span in sampled.spans] == [(number, 0, len(sampled.ids))]
        assert gap(versions[number][0], prompt, sampled) < MAX_DLOGPROB
    assert gap(versions[0][0], PROMPTS[-1], answers[-1]) > 100 * MAX_DLOGPROB


async def test_an_unloaded_adapter_lives_on_in_the_requests_that_have_it(
    client: Any, wire: EngineClient, versions: dict[int, tuple[PreTrainedModel, Path]]
) -> None:
    name = version_name(RUN, 1)
    await wire.load_adapter(client.url, versions[1][1], name)
    # Any of them may sample the end after a few tokens.
    running = [
        asyncio.create_task(generate(wire, client.url, PROMPTS[2], adapter=1, max_tokens=600)) for _ in range(16)
    ]
    await client.wait_for("generation_tokens_total", lambda count: count >= 32)
    assert await wire.adapters_in_use(client.url) == {name}
    await wire.unload_adapter(client.url, name)
    await wire.unload_adapter(client.url, name)
    with pytest.raises(EngineUnavailable, match=f"The model `{name}` does not exist"):
        await generate(wire, client.url, PROMPTS[0], adapter=1)
    for sampled in await asyncio.gather(*running):
        assert gap(versions[1][0], PROMPTS[2], sampled) < MAX_DLOGPROB
    assert await wire.adapters_in_use(client.url) == set()


def lacks_a_file(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()


def lost_half_a_pair(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def of_another_rank(folder: Path) -> None:
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"r": 8}))


def of_another_kind(folder: Path) -> None:
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"use_dora": True}))


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    tensors[next(iter(tensors))][0, 0] = float("nan")
    save_file(tensors, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lacks_a_file, "cannot be read"),
        (lost_half_a_pair, "A and B have shapes"),
        (of_another_rank, "the model needs"),
        (of_another_kind, "only plain LoRA"),
        (not_finite, "NaN or infinite"),
    ],
)
async def test_a_folder_that_does_not_fit_is_refused_and_the_others_serve_on(
    client: Any,
    wire: EngineClient,
    base: Path,
    tmp_path: Path,
    versions: dict[int, tuple[PreTrainedModel, Path]],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    await wire.load_adapter(client.url, versions[0][1], version_name(RUN, 0))
    path = publish_adapter(WeightStore(tmp_path), RUN, 1, make_adapted(base, seed=7)).path
    spoil(path)
    with pytest.raises(LoadRefused, match=r"manifest|published|cannot be read"):
        await wire.load_adapter(client.url, path, version_name(RUN, 1))
    (path / MANIFEST).unlink()
    with pytest.raises(LoadRefused, match=message):
        await wire.load_adapter(client.url, path, version_name(RUN, 1))
    with pytest.raises(LoadRefused, match="No adapter found for /nowhere"):
        await wire.load_adapter(client.url, Path("/nowhere"), version_name(RUN, 1))
    with pytest.raises(LoadRefused, match="already been loaded"):
        await wire.load_adapter(client.url, versions[1][1], version_name(RUN, 0))
    assert gap(versions[0][0], PROMPTS[1], await generate(wire, client.url, PROMPTS[1], adapter=0)) < MAX_DLOGPROB
