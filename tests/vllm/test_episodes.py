"""Whole episodes on real vLLM: the trainer's rows are what went over the wire, and its log-probs are the engine's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from common.config import RolloutConfig, RunConfig
from common.db.engines import EngineRow
from common.db.episodes import Claim
from common.episode import EngineState, ScoredEpisode, Stage, ToolCall, Turn, TurnTokens
from common.weights import version_name
from tests.vllm.serving import RUN, serving
from trainer.policy import Policy
from trainer.samples import Sample, make_samples, microbatches, pad
from workers.agent import Agent, Generated
from workers.engine_client import EngineClient
from workers.engine_http import EngineHttp, Json
from workers.engine_pool import EnginePool
from workers.handlers.calculator import Calculator
from workers.render import Renderer
from workers.wires.completions import COMPLETIONS
from workers.wires.vllm import GENERATE

NUM_EPISODES = 200
"""With at least MIN_TURNS turns, for each way of sampling."""
MIN_TURNS = 3
AT_ONCE = 32
MAX_DLOGPROB = 1e-4
PROMPT_FIELDS = {GENERATE: "token_ids", COMPLETIONS: "prompt"}
"""Route -> the field with the prompt's ids."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One generate request as it went over the wire."""

    sent: tuple[int, ...]
    returned: tuple[int, ...]


class TappedHttp(EngineHttp):
    """Keeps the ids of all generate requests, by the request's id."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[str, Exchange] = {}

    async def send(
        self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None
    ) -> tuple[int, bytes]:
        status, raw = await super().send(method, url, path, timeout_s=timeout_s, body=body)
        if path in PROMPT_FIELDS and status == 200 and body is not None:
            sent = json.loads(json.dumps(body))
            returned = json.loads(raw)["choices"][0]["token_ids"]
            exchange = Exchange(sent=tuple(sent[PROMPT_FIELDS[path]]), returned=tuple(returned))
            self.exchanges[sent["request_id"]] = exchange
        return status, raw


@dataclass
class Played:
    """One episode: the turns as they would be stored, and its requests' ids in order."""

    turns: list[Turn] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)


class RunStage:
    """The RUN stage's parts on one engine, without queue, table and lease."""

    def __init__(self, client: EngineClient, url: str, config: RunConfig) -> None:
        row = EngineRow(id=1, url=url, run_id=1, state=EngineState.SERVING, version=0)
        self.config = config
        self.pool = EnginePool(client, lambda run_id: [row], wait_s=30)
        self.renderer = Renderer.from_folder(config.model)
        self.handler = Calculator()

    async def play(self, number: int, payload: dict[str, object]) -> Played:
        played = Played()
        claim = make_claim(number, self.config)
        prepared = self.handler.init(payload)  # type: ignore[arg-type]

        async def generate(prompt_ids: list[int]) -> Generated:
            request_id = f"{uuid4().hex}"
            played.request_ids.append(f"{request_id}.0")
            return await self.pool.generate(claim, prompt_ids, request_id=request_id, stop_ids=self.renderer.stop_ids)

        async def call_tool(call: ToolCall) -> str:
            return await self.handler.call_tool(call, payload, None)  # type: ignore[arg-type]

        async def save(turn: Turn) -> None:
            played.turns.append(turn)

        agent = Agent(
            renderer=self.renderer,
            config=self.config.rollout,
            generate=generate,
            call_tool=call_tool,
            save=save,
            spent_s=lambda: 0.0,
        )
        end = await agent.play(prepared.messages, prepared.tools, ())
        if end.last is not None:
            played.turns.append(end.last)
        return played


def make_claim(number: int, config: RunConfig) -> Claim:
    return Claim(
        stage=Stage.RUN,
        episode_id=number,
        attempt=1,
        token=uuid4(),
        worker="w",
        group_id=number // config.rollout.group_size,
        run_id=1,
        config=config,
        handler="calculator",
        payload={},
        prepared=None,
        num_turns=0,
        outcome=None,
        transcript=[],
    )


async def play_until_enough(stage: RunStage) -> list[Played]:
    """Episodes with MIN_TURNS turns or more; the others are played and left out."""
    payloads = stage.handler.tasks(seed=7, num_tasks=20 * NUM_EPISODES)
    kept: list[Played] = []
    numbers = iter(range(20 * NUM_EPISODES))

    async def work() -> None:
        while len(kept) < NUM_EPISODES:
            played = await stage.play(next(numbers), next(payloads))
            if len(played.turns) >= MIN_TURNS:
                kept.append(played)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return kept


def row_of(number: int, played: Played) -> Sample:
    """The training row, through the records that the trainer reads from the database."""
    turns = tuple(
        TurnTokens(
            suffix_ids=np.array(turn.suffix_ids, np.int32),
            sampled_ids=np.array(turn.sampled.ids, np.int32),
            logprobs=np.array(turn.sampled.logprobs, np.float32),
            versions=np.repeat(
                [span.version for span in turn.sampled.spans],
                [span.end - span.start for span in turn.sampled.spans],
            ).astype(np.int32),
        )
        for turn in played.turns
    )
    episode = ScoredEpisode(episode_id=number, group_id=0, outcome="finished", reward=0.0, turns=turns)
    (row,) = make_samples(episode)
    return row


def num_id_differences(row: Sample, exchanges: list[Exchange]) -> int:
    """Positions where the row or its mask is not what the requests, in order, were sent and gave back."""
    differences = 0
    ids, mask = row.ids_L.tolist(), row.mask_L.tolist()
    expected_mask: list[bool] = []
    for exchange in exchanges:
        end = len(exchange.sent) + len(exchange.returned)
        given = (*exchange.sent, *exchange.returned)
        differences += sum(a != b for a, b in zip(ids[:end], given, strict=False)) + abs(len(ids[:end]) - end)
        expected_mask += [False] * (len(exchange.sent) - len(expected_mask)) + [True] * len(exchange.returned)
    return (
        differences
        + sum(a != b for a, b in zip(mask, expected_mask, strict=False))
        + abs(len(mask) - len(expected_mask))
    )


def max_dlogprob(policy: Policy, rows: list[Sample]) -> float:
    """Largest distance between the engine's log-probs and the trainer's own."""
    largest = 0.0
    with torch.no_grad():
        for part in microbatches(rows, max_positions=8192):
            batch = pad(part)
            gaps = (policy.logprobs(batch) - batch.behaviour_logprobs_BL)[batch.mask_BL].abs()
            largest = max(largest, gaps.max().item())
    return largest


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny, log_file=tmp_path_factory.mktemp("vllm") / "engine.log") as url:
        yield url


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
async def test_the_trainer_sees_what_the_engine_sampled(
    engine: str, tiny: Path, temperature: float, top_p: float, figures: dict[str, object]
) -> None:
    rollout = RolloutConfig(temperature=temperature, top_p=top_p)
    config = RunConfig(name=RUN, model=tiny, rollout=rollout)
    http = TappedHttp()
    async with EngineClient(timeout_s=60, http=http) as client:
        await client.update_weight_version(engine, version_name(RUN, 0))
        played = await play_until_enough(RunStage(client, engine, config))
    rows = [row_of(number, one) for number, one in enumerate(played)]
    differences = sum(
        num_id_differences(row, [http.exchanges[request_id] for request_id in one.request_ids])
        for row, one in zip(rows, played, strict=True)
    )
    largest = max_dlogprob(Policy.load(config), rows)
    figures["episodes"] = figures.get("episodes", 0) + len(rows)  # type: ignore[operator]
    figures["id_differences"] = figures.get("id_differences", 0) + differences  # type: ignore[operator]
    figures["max_dlogprob"] = f"{max(largest, float(str(figures.get('max_dlogprob', 0)))):.1e}"
    assert len(rows) >= NUM_EPISODES
    assert differences == 0
    assert largest < MAX_DLOGPROB
    assert all((row.versions_L[row.mask_L] == 0).all() for row in rows)
