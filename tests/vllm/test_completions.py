"""Episodes on a vLLM whose generate route is shut: the fallback to /v1/completions samples them just as exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from common.config import RolloutConfig, RunConfig
from common.config_distill import DistillConfig
from common.episode import FinishReason, Sampled
from common.errors import RollmillError, SetupError
from common.weights import version_name
from deploy.engine_ask import EngineKind
from deploy.engine_probe import check_engine, num_requests
from tests.ranks import random_rows
from tests.vllm.episodes import MIN_TURNS, SAMPLINGS, RunStage, TappedHttp, compare, play_until_enough
from tests.vllm.serving import OWN_SAMPLING, RUN, serving, with_own_sampling
from trainer.policy import Policy
from trainer.samples import pad
from trainer.teacher import read_tokenizer
from trainer.teacher_server import ServedTeacher
from workers.engine_client import EngineClient
from workers.engine_errors import ContextOverflow
from workers.wires.completions import COMPLETIONS
from workers.wires.vllm import GENERATE

NUM_EPISODES = 40
MAX_MODEL_LEN = 512
MAX_TEACHER_GAP = 1e-4
"""Nats: float32 on both sides."""


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server without --enable-scale-out and --generation-config vllm: its model's folder says how to sample."""
    folder = tmp_path_factory.mktemp("vllm")
    shut = ("--no-enable-scale-out", "--max-model-len", str(MAX_MODEL_LEN), *OWN_SAMPLING)
    model = with_own_sampling(tiny, folder / "model")
    with serving(model, log_file=folder / "engine.log", extra=shut) as url:
        yield url


@pytest.mark.parametrize(("temperature", "top_p"), SAMPLINGS)
async def test_the_trainer_sees_what_the_engine_sampled(
    engine: str, tiny: Path, temperature: float, top_p: float, figures: dict[str, object]
) -> None:
    config = RunConfig(name=RUN, model=tiny, rollout=RolloutConfig(temperature=temperature, top_p=top_p))
    http = TappedHttp()
    async with EngineClient(timeout_s=60, http=http) as client:
        await client.update_weight_version(engine, version_name(RUN, 2))
        await generate(client, engine, [5, 20])
        assert http.num_requests[GENERATE] == 1
        episodes = await play_until_enough(RunStage(client, engine, config), num_episodes=NUM_EPISODES)
    assert http.num_requests[GENERATE] == 1
    assert http.num_requests[COMPLETIONS] > MIN_TURNS * NUM_EPISODES
    found = compare(episodes, http, config, version=2)
    found.add_to(figures, family="tiny")
    found.check(num_episodes=NUM_EPISODES)


async def generate(client: EngineClient, url: str, prompt_ids: list[int], **changes: object) -> Sampled:
    usual: dict[str, object] = {
        "request_id": uuid4().hex,
        "max_tokens": 4,
        "temperature": 2.0,
        "stop_ids": (),
        "model": None,
        "run": RUN,
    }
    return await client.generate(url, prompt_ids=prompt_ids, **(usual | changes))  # type: ignore[arg-type]


async def test_a_context_that_fills_ends_by_length_and_a_full_one_is_told_apart(
    engine: str, client: EngineClient
) -> None:
    await client.update_weight_version(engine, version_name(RUN, 2))
    sampled = await generate(client, engine, [5] * (MAX_MODEL_LEN - 2), max_tokens=40)
    assert len(sampled.ids) <= 2
    with pytest.raises(ContextOverflow, match=str(MAX_MODEL_LEN)):
        await generate(client, engine, [5] * MAX_MODEL_LEN)


async def test_an_abort_ends_the_request_and_keeps_what_was_sampled(engine: str, client: EngineClient) -> None:
    await client.update_weight_version(engine, version_name(RUN, 2))
    await generate(client, engine, [5, 20])
    for number in range(30):
        request_id = f"long-{number}"
        task = asyncio.create_task(generate(client, engine, [5, 20], request_id=request_id, max_tokens=500))
        while not task.done() and not await asyncio.to_thread(num_requests, engine):
            continue
        for _ in range(number):
            # Each one decodes a little longer, until one has sampled something and has not ended by itself.
            await client.check_health(engine)
        while not task.done():
            await client.abort(engine, [request_id])
        sampled = await task
        if sampled.finish_reason is FinishReason.ABORT and sampled.ids:
            break
    assert sampled.finish_reason is FinishReason.ABORT
    assert 0 < len(sampled.ids) == len(sampled.logprobs) < 500


async def test_it_is_told_at_the_registration(engine: str, tiny: Path) -> None:
    kind = await asyncio.to_thread(check_engine, engine, model=tiny, served_name="policy", temperature=0.7, top_p=0.9)
    assert kind is EngineKind.VLLM_COMPLETIONS


async def test_raw_logprobs_are_found_out_and_a_full_context_on_the_generate_route(
    tiny: Path, tmp_path: Path, client: EngineClient
) -> None:
    raw = ("--logprobs-mode", "raw_logprobs", "--max-model-len", str(MAX_MODEL_LEN))
    with serving(tiny, log_file=tmp_path / "raw.log", extra=raw) as url:
        assert await asyncio.to_thread(check_engine, url, model=tiny, served_name="policy") is EngineKind.VLLM
        with pytest.raises(SetupError, match="--logprobs-mode processed_logprobs"):
            await asyncio.to_thread(check_engine, url, model=tiny, served_name="policy", temperature=0.7)
        await client.update_weight_version(url, version_name(RUN, 2))
        assert len((await generate(client, url, [5] * (MAX_MODEL_LEN - 2), max_tokens=40)).ids) <= 2
        for num_ids in (MAX_MODEL_LEN, MAX_MODEL_LEN + 100):
            with pytest.raises(ContextOverflow):
                await generate(client, url, [5] * num_ids)


def test_as_a_teacher_it_says_what_its_model_says_and_which_vocabulary_it_has(
    engine: str, tiny: Path, tmp_path: Path, figures: dict[str, object]
) -> None:
    distill = DistillConfig(teacher=engine)
    teacher = ServedTeacher(distill, tokenizer=read_tokenizer(tiny))
    teacher.check()
    rows = random_rows(lengths=[12, 60, MAX_MODEL_LEN - 1], seed=3)
    policy = Policy.load(RunConfig(name=RUN, model=tiny))
    found = teacher.logprobs(rows)
    gap = 0.0
    for row in rows:
        with torch.no_grad():
            expected_L = policy.logprobs(pad([row]))[0].numpy()
        gap = max(gap, float(np.abs(found[row.key] - expected_L)[row.mask_L].max()))
    figures["teacher_gap_max"] = f"{gap:.1e}"
    assert gap < MAX_TEACHER_GAP
    (too_long,) = random_rows(lengths=[MAX_MODEL_LEN + 2], seed=3)
    with pytest.raises(RollmillError, match=r"episode 0 row 0: .* answers 400: "):
        teacher.logprobs([too_long])

    text = (tiny / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<tool_response>", "<answer>"))
    with pytest.raises(SetupError, match=r"id [0-9]+ is '<tool_response>' there, '<answer>' here"):
        ServedTeacher(distill, tokenizer=read_tokenizer(tmp_path)).check()
