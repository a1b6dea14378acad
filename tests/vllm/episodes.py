"""Plays whole episodes on a real engine, and compares the trainer's rows with what went over the wire."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from pydantic import JsonValue

from common.config import RunConfig
from common.db.engines import EngineRow
from common.episode import EngineState, ScoredEpisode, ToolCall, Turn, TurnTokens
from tests.claims import make_claim
from trainer.policy import Policy
from trainer.samples import Sample, make_samples, microbatches, pad
from workers.agent import Agent, Generated
from workers.engine_client import EngineClient
from workers.engine_http import EngineHttp, Json
from workers.engine_pool import EnginePool
from workers.handlers.calculator import Calculator
from workers.render.of_run import renderer_of
from workers.wires.completions import COMPLETIONS
from workers.wires.vllm import GENERATE

MIN_TURNS = 3
AT_ONCE = 32
MAX_DLOGPROB = 1e-4
"""In nats, between float32 models."""
EDGE = 1e-5
"""Of probability: what differences of such log-probs come to when they are added up to top-p."""
MAX_EDGE_SHARE = 1e-3
"""Of the tokens."""
SAMPLINGS = ((1.0, 1.0), (0.7, 0.9))
"""(temperature, top-p)."""
PROMPT_FIELDS = {GENERATE: "token_ids", COMPLETIONS: "prompt"}
"""Route -> the field with the prompt's ids."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One generate request as it went over the wire."""

    sent: tuple[int, ...]
    returned: tuple[int, ...]


class TappedHttp(EngineHttp):
    """Keeps the ids of all requests that sample, by the request's id, and counts the requests of each route."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[str, Exchange] = {}
        self.num_requests: Counter[str] = Counter()

    async def send(
        self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None
    ) -> tuple[int, bytes]:
        self.num_requests[path] += 1
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

    @property
    def is_long(self) -> bool:
        return len(self.turns) >= MIN_TURNS


class RunStage:
    """The RUN stage's parts on one engine, without queue, table and lease."""

    def __init__(self, client: EngineClient, url: str, config: RunConfig) -> None:
        row = EngineRow(id=1, url=url, run_id=1, state=EngineState.SERVING, version=0)
        self.config = config
        self.pool = EnginePool(client, lambda run_id: [row], wait_s=30)
        self.renderer = renderer_of(config)
        self.handler = Calculator()

    async def play(self, number: int, payload: dict[str, JsonValue]) -> Played:
        played = Played()
        group = number // self.config.rollout.group_size
        claim = make_claim(self.config, episode=number, group=group)
        prepared = self.handler.init(payload)

        async def generate(prompt_ids: list[int]) -> Generated:
            request_id = f"{uuid4().hex}"
            played.request_ids.append(f"{request_id}.0")
            return await self.pool.generate(claim, prompt_ids, request_id=request_id, stop_ids=self.renderer.stop_ids)

        async def call_tool(call: ToolCall) -> str:
            return await self.handler.call_tool(call, payload, None)

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


async def play_until_enough(stage: RunStage, *, num_episodes: int) -> list[Played]:
    """All episodes until that many have MIN_TURNS turns or more."""
    most = 20 * num_episodes
    payloads = stage.handler.tasks(seed=7, num_tasks=most)
    numbers = iter(range(most))
    episodes: list[Played] = []
    num_playing = 0

    async def work() -> None:
        nonlocal num_playing
        while sum(played.is_long for played in episodes) + num_playing < num_episodes:
            num_playing += 1
            played = await stage.play(next(numbers), next(payloads))
            num_playing -= 1
            episodes.append(played)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return episodes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the episodes of one way of sampling came to."""

    num_long: int
    """Episodes of MIN_TURNS turns or more."""
    num_tokens: int
    """Sampled ones, in all episodes."""
    num_id_differences: int
    max_dlogprob: float
    num_edges: int
    """Tokens at whose place rounding decides on the nucleus."""

    def check(self, *, num_episodes: int) -> None:
        """Assert what must hold of any engine and model."""
        assert self.num_long >= num_episodes
        assert self.num_id_differences == 0
        assert self.max_dlogprob < MAX_DLOGPROB
        assert self.num_edges <= MAX_EDGE_SHARE * self.num_tokens

    def add_to(self, figures: dict[str, Any], *, family: str) -> None:
        """Into the line that a run of the tests ends with."""
        figures.setdefault("families", Names()).add(family)
        figures["episodes"] = figures.get("episodes", 0) + self.num_long
        figures["id_differences"] = figures.get("id_differences", 0) + self.num_id_differences
        figures["nucleus_edges"] = figures.get("nucleus_edges", 0) + self.num_edges
        figures["max_dlogprob"] = f"{max(self.max_dlogprob, float(figures.get('max_dlogprob', 0))):.1e}"


class Names(set[str]):
    """Shown as their number."""

    def __str__(self) -> str:
        return str(len(self))


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


def logprob_gaps(config: RunConfig, rows: list[Sample]) -> tuple[float, int]:
    """(largest distance between the engine's log-probs and the trainer's own, tokens at the nucleus's edge).

    Where the likeliest tokens add up to top-p but for rounding, one more token may be in one side's nucleus than in the
    other's; such positions are measured in whichever of the two nuclei fits.
    """

    def policy_of(top_p: float) -> Policy:
        return Policy.load(config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_p": top_p})}))

    largest, num_edges, top_p = 0.0, 0, config.rollout.top_p
    policy, near = policy_of(top_p), [policy_of(top_p + by) for by in (-EDGE, EDGE) if top_p < 1]
    with torch.no_grad():
        for part in microbatches(rows, max_positions=8192):
            batch = pad(part)
            gaps = (policy.logprobs(batch) - batch.behaviour_logprobs_BL).abs()
            is_far = gaps >= MAX_DLOGPROB
            for other in near if is_far.any() else ():
                gaps = gaps.minimum((other.logprobs(batch) - batch.behaviour_logprobs_BL).abs())
            num_edges += int((is_far & (gaps < MAX_DLOGPROB)).sum())
            largest = max(largest, gaps[batch.mask_BL].max().item())
    return largest, num_edges


def compare(episodes: list[Played], http: TappedHttp, config: RunConfig, *, version: int = 0) -> Comparison:
    """Rows against the wire, and the engine's log-probs against those of the model that the trainer loads.

    `version`: the one that all tokens must have.
    """
    rows = [row_of(number, played) for number, played in enumerate(episodes)]
    differences = sum(
        num_id_differences(row, [http.exchanges[request_id] for request_id in played.request_ids])
        for row, played in zip(rows, episodes, strict=True)
    )
    assert all((row.versions_L[row.mask_L] == version).all() for row in rows)
    largest, num_edges = logprob_gaps(config, rows)
    return Comparison(
        num_long=sum(played.is_long for played in episodes),
        num_tokens=sum(row.num_tokens for row in rows),
        num_id_differences=differences,
        max_dlogprob=largest,
        num_edges=num_edges,
    )
