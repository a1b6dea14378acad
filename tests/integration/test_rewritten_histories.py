"""Episodes whose history is rewritten, from the engine's wire over RUN and the tables to the trainer's rows."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import JsonValue
from sqlalchemy import text

from common.config import RenderConfig, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit, engines, episodes, report, retries, runs, steps, tasks, turns
from common.db.engines import EngineRow
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import EngineState, EpisodeState, Message, ToolCall
from common.outcomes import Outcome
from common.settings import Settings
from common.weights import Published, version_name
from tests.integration.world import World
from tests.unit.workers.model_families import QWEN
from trainer.loop import account, prepare, rows_of
from trainer.samples import Sample
from workers.engine_client import EngineClient
from workers.engine_http import EngineHttp, Json
from workers.engine_pool import EnginePool
from workers.handlers.base import Compacts, Prepared, Score
from workers.render import Call, Renderer, split_samples
from workers.render.of_run import renderer_of
from workers.run import Run
from workers.sandbox import open_backend
from workers.scripted_engine import ScriptedEngine

GENERATE = "/inference/v1/generate"
DROPS_THINKING = QWEN.template.replace("message.content", "message.content.split('</think>')[-1].lstrip()")
NUM_TOOL_TURNS = 5
KINDS: dict[str, tuple[bool, int | None]] = {
    "nothing": (True, None),
    "thinking": (False, None),
    "results": (True, 350),
    "both": (False, 350),
}
"""What is dropped -> keep_thinking and compact_tokens."""


READ = Message(role="tool", content="(read)")


class Killed(RuntimeError):
    """The process is gone: whatever was to be done after it is not done."""


class Walk:
    """Five steps with a tool. Results but the last are shortened, two at a time, once the conversation is long."""

    name = "walk"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        return ({"place": str(number)} for number in range(num_tasks))

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        return Prepared(messages=(Message(role="user", content=f"Go from {payload['place']}. [step 0]"),))

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: object) -> str:
        return f"[step {call.arguments['n']}] " + "a tree. " * 8

    async def compact(self, messages: tuple[Message, ...], payload: dict[str, JsonValue]) -> list[Message] | None:
        results = [index for index, message in enumerate(messages) if message.role == "tool"]
        unread = [index for index in results[:-1] if messages[index].content != READ.content]
        if len(unread) < 2:
            return None
        return [READ if index in unread else message for index, message in enumerate(messages)]

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        return Score(reward=float(transcript[-1].content.endswith("There.")))


@dataclass
class Wire:
    """What went over it: the completed requests of one episode."""

    calls: list[Call] = field(default_factory=list)
    dies: str = "never"
    """At each request once: before it is sent, or when its answer has come and is not stored."""
    num_deaths: int = 0

    def may_kill(self, when: str) -> None:
        """Raise Killed if the process is to die now."""
        if self.dies == when and self.num_deaths == len(self.calls):
            self.num_deaths += 1
            raise Killed


class TappedHttp(EngineHttp):
    """Keeps the ids of all requests that were answered."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    async def send(
        self, method: str, url: str, path: str, *, timeout_s: float, body: Json | None = None
    ) -> tuple[int, bytes]:
        if path != GENERATE or body is None:
            return await super().send(method, url, path, timeout_s=timeout_s, body=body)
        self.wire.may_kill("before each request")
        status, raw = await super().send(method, url, path, timeout_s=timeout_s, body=body)
        self.wire.may_kill("after each answer")
        sent, returned = json.loads(json.dumps(body))["token_ids"], json.loads(raw)["choices"][0]["token_ids"]
        self.wire.calls.append(Call(prompt_ids=tuple(sent), sampled_ids=tuple(returned)))
        return status, raw


class Walker:
    """A policy that thinks before each step, in ids that its own text would not give again."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tokenizer = QWEN.tokenizer()

    def __call__(self, prompt: list[int]) -> list[int]:
        step = int(re.findall(r"\[step (\d+)\]", self._renderer.decode(prompt))[-1])
        said = f"<think>\nhm {step}\n</think>\n\n"
        if step < NUM_TOOL_TURNS:
            said += f'<tool_call>{{"name":"look","arguments":{{"n":{step + 1}}}}}</tool_call>'
        else:
            said += "There."
        return [*(i for letter in said for i in self._tokenizer.encode(letter).ids), self._renderer.close_id]


@dataclass
class Fleet:
    """RUN against one engine, as a new process each time."""

    world: World
    engine: ScriptedEngine
    renderer: Renderer
    data_dir: Path

    def _rows(self, run_id: int) -> list[EngineRow]:
        return [EngineRow(id=1, url=self.engine.url, run_id=run_id, state=EngineState.SERVING, version=0)]

    async def play(self, wakeup: Wakeup, wire: Wire) -> Wakeup:
        """Play to the end, however often the process dies on the way."""
        while True:
            claim = self.world.must_claim(wakeup, lease_s=-1)
            try:
                async with EngineClient(timeout_s=30, http=TappedHttp(wire)) as client:
                    done = await Run(
                        database=self.world.database,
                        engines=EnginePool(client, self._rows, wait_s=10),
                        handler=lambda name: Walk(),
                        renderer=lambda config: self.renderer,
                        backend=open_backend(Settings(data_dir=self.data_dir)),
                        node="here",
                    )(claim)
            except Killed:
                with self.world.database.begin() as conn:
                    (wakeup,) = retries.reap(conn, max_attempts=9)
                continue
            assert done.last_turn is not None
            assert done.outcome is Outcome.FINISHED
            with self.world.database.begin() as conn:
                return turns.save_last(conn, claim, done.last_turn, outcome=done.outcome)

    def prepare(self, wakeup: Wakeup) -> Wakeup:
        claim = self.world.must_claim(wakeup)
        messages = [message.model_dump() for message in Walk().init(claim.payload).messages]
        prepared = {"messages": messages, "tools": [], "sandbox": None}
        with self.world.database.begin() as conn:
            moved = episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared=prepared)
        assert moved is not None
        return moved


@pytest.fixture
async def fleet(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    keep_thinking, compact_tokens = KINDS[request.param]
    config = RunConfig(
        name="run-a",
        handler="walk",
        model=QWEN.write(tmp_path, template=DROPS_THINKING),
        rollout=RolloutConfig(group_size=2, max_turns=9, max_tokens_per_turn=200, compact_tokens=compact_tokens),
        render=RenderConfig(keep_thinking=keep_thinking),
        train=TrainConfig(groups_per_step=1, minibatches=1, num_versions=1),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://engine", run_id=run.id)
        tasks.load(conn, dataset=config.dataset_name, handler="walk", payloads=[("0", {"place": "7"})])
        world = World(database, run, tasks.ids(conn, config.dataset_name))
    renderer = renderer_of(config)
    engine = ScriptedEngine(Walker(renderer), max_model_len=8192)
    engine.version = version_name(config.name, 0)
    await engine.start()
    yield Fleet(world, engine, renderer, tmp_path)
    await engine.stop()


def trained_rows(world: World) -> tuple[list[Sample], dict[str, int]]:
    """What the trainer makes of the one group, in a whole step; and what the audit then finds."""
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=1, max_staleness=1).step
        assert step is not None
        groups = tuple(steps.load_groups(conn, step.id))
        rows = rows_of(groups)
        advantages, metrics = prepare(
            groups, rows, version=0, train=world.run.config.train, reference_kl=lambda samples: {}
        )
        assert (metrics["num_episodes"], metrics["num_rows"]) == (2, len(rows))
        published = Published(location=str(world.run.config.model), manifest_sha256="0" * 64)
        steps.finish_step(conn, step, published=published, metrics=metrics, trained=account(rows, advantages))
        return rows, {name: count for name, count in audit.violations(conn, world.run.id).items() if count}


def differences(rows: Sequence[Sample], calls: Sequence[Call]) -> int:
    """Positions at which the rows or their masks are not what the wire says."""
    told = [
        [(token, segment.sampled) for segment in sample for token in segment.ids] for sample in split_samples(calls)
    ]
    made = [list(zip(row.ids_L.tolist(), row.mask_L.tolist(), strict=True)) for row in rows]
    unequal = sum(a != b for one, other in zip(told, made, strict=False) for a, b in zip(one, other, strict=False))
    return unequal + abs(sum(map(len, told)) - sum(map(len, made))) + abs(len(told) - len(made))


def test_the_handler_of_these_tests_is_one_that_compacts() -> None:
    assert isinstance(Walk(), Compacts)


@pytest.mark.parametrize(
    ("fleet", "num_breaks"),
    [("nothing", 0), ("thinking", NUM_TOOL_TURNS), ("results", 2), ("both", NUM_TOOL_TURNS)],
    indirect=["fleet"],
)
@pytest.mark.parametrize("dies", ["never", "before each request", "after each answer"])
async def test_rows_are_what_went_over_the_wire_whoever_dies(fleet: Fleet, num_breaks: int, dies: str) -> None:
    world = fleet.world
    wires: dict[int, Wire] = {}
    for wakeup in world.feed(1):
        wire = wires[wakeup.episode_id] = Wire(dies=dies)
        sampled = await fleet.play(fleet.prepare(wakeup), wire)
        world.score(sampled, float(len(wires) % 2))
        assert wire.num_deaths == (0 if dies == "never" else NUM_TOOL_TURNS + 1)

    rows, found = trained_rows(world)

    for episode_id, wire in wires.items():
        of_it = [row for row in rows if row.episode_id == episode_id]
        assert len(wire.calls) == NUM_TOOL_TURNS + 1
        assert differences(of_it, wire.calls) == 0
        assert len(of_it) == num_breaks + 1
        assert sum(row.num_tokens for row in of_it) == sum(len(call.sampled_ids) for call in wire.calls)
    assert found == {}
    check_views(world, rows, num_breaks=num_breaks)


def check_views(world: World, rows: Sequence[Sample], *, num_breaks: int) -> None:
    with world.database.begin() as conn:
        seen = conn.execute(text("SELECT * FROM samples WHERE run = 'run-a' ORDER BY episode_id, sample")).all()
        assert report.summary(conn, world.run.id).histories_rewritten == 2 * num_breaks
        assert report.summary(conn, world.run.id).token_mismatches == 0
    assert len(seen) == len(rows)
    for row, shown in zip(rows, seen, strict=True):
        assert (shown.episode_id, shown.sample, shown.num_sampled) == (row.episode_id, row.index, row.num_tokens)
        assert shown.ids == row.ids_L.tolist()
        assert shown.mask == row.mask_L.astype(int).tolist()
        assert shown.logprobs == row.behaviour_logprobs_L.tolist()


@pytest.mark.parametrize("fleet", ["nothing"], indirect=True)
async def test_what_is_stored_of_a_history_that_is_not_rewritten_is_each_id_once(fleet: Fleet) -> None:
    wire = Wire()
    await fleet.play(fleet.prepare(fleet.world.feed(1)[0]), wire)
    with fleet.world.database.begin() as conn:
        stored = conn.execute(text("SELECT sum(num_suffix + num_sampled) FROM turn")).scalar_one()
    assert stored == len(wire.calls[-1].prompt_ids) + len(wire.calls[-1].sampled_ids)
