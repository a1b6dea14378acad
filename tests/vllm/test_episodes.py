"""Whole episodes on real vLLM: the trainer's rows are what went over the wire, and its log-probs are the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import RolloutConfig, RunConfig
from common.weights import version_name
from tests.vllm.episodes import SAMPLINGS, RunStage, TappedHttp, compare, play_until_enough
from tests.vllm.serving import OWN_SAMPLING, RUN, serving, with_own_sampling
from workers.engine_client import EngineClient

NUM_EPISODES = 200
"""With enough turns, for each way of sampling."""


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model's folder says how to sample, and where to stop."""
    folder = tmp_path_factory.mktemp("vllm")
    model = with_own_sampling(tiny, folder / "model")
    with serving(model, log_file=folder / "engine.log", extra=OWN_SAMPLING) as url:
        yield url


@pytest.mark.parametrize(("temperature", "top_p"), SAMPLINGS)
async def test_the_trainer_sees_what_the_engine_sampled(
    engine: str, tiny: Path, temperature: float, top_p: float, figures: dict[str, object]
) -> None:
    rollout = RolloutConfig(temperature=temperature, top_p=top_p)
    config = RunConfig(name=RUN, model=tiny, rollout=rollout)
    http = TappedHttp()
    async with EngineClient(timeout_s=60, http=http) as client:
        await client.update_weight_version(engine, version_name(RUN, 0))
        episodes = await play_until_enough(RunStage(client, engine, config), num_episodes=NUM_EPISODES)
    found = compare(episodes, http, config)
    found.add_to(figures, family="tiny")
    found.check(num_episodes=NUM_EPISODES)
