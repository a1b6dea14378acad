"""What hangs in a handler ends with its stage's budget: told to stop first, then given up, and never scored."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from sqlalchemy import text

from common.config import TINY_MODELS
from common.db import cancel
from common.db.episodes import Claim, Wakeup
from common.episode import FinishReason, Message, Sampled, Stage, ToolCall, VersionSpan
from common.settings import Settings
from tests.integration.world import World
from workers.agent import Generated, OutOfTime
from workers.eval import Eval
from workers.handlers.base import Prepared, Score
from workers.init import Init
from workers.leases import Leases
from workers.render import Renderer
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.stage import StageWorker, Work
from workers.stage_threads import StageThreads, StageTimeout

MODEL = TINY_MODELS / "tiny-calculator"
BUDGET_S = 0.3
WITHIN_S = 20.0


class Hanging:
    """Hangs wherever it is told to, until it is released; what it makes then must count for nothing."""

    name = "calculator"

    def __init__(self, *, hangs_in: str = "", stubborn: bool = False) -> None:
        self.hangs_in = hangs_in
        self.stubborn = stubborn
        self.started = threading.Event()
        self.released = threading.Event()
        self.stopped: list[str] = []
        """Where it saw that it has to stop."""
        self.leaves_in = ""
        """Where it calls sys.exit."""
        self.answer: object = "4"
        """Of its tool."""

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        self._perhaps_hang("init")
        return Prepared(messages=(Message(role="user", content="go"),))

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: object) -> str:
        if self.hangs_in == "call_tool":
            self.started.set()
            await asyncio.Event().wait()
        self._perhaps_leave("call_tool")
        return self.answer  # type: ignore[return-value]  # what is no text must be refused

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        self._perhaps_hang("eval")
        return Score(reward=1.0)

    def _perhaps_leave(self, where: str) -> None:
        if where == self.leaves_in:
            sys.exit(4)

    def _perhaps_hang(self, where: str) -> None:
        self._perhaps_leave(where)
        while where == self.hangs_in and not self.released.is_set():
            try:
                self.started.set()
                self.released.wait(60.0 if self.stubborn else 0.01)
            except StageTimeout:
                self.stopped.append(where)
                if not self.stubborn:
                    raise


class Stages:
    """The three stages of one process, without the broker."""

    def __init__(self, world: World, handler: Hanging, leases: Leases, loop: RunLoop, settings: Settings) -> None:
        self.handler = handler
        self.given_up: list[int] = []
        self.sent: list[Wakeup] = []
        self.has_model = True
        renderer = Renderer.from_folder(MODEL)
        self.engine = Saying(renderer)
        backend = open_backend(settings)
        threads = StageThreads("stage")
        init = Init(world.database, handler=lambda name: handler, backend=backend, node=settings.node)  # type: ignore[arg-type,return-value]
        evaluate = Eval(handler=lambda name: handler)  # type: ignore[arg-type,return-value]
        play = Run(
            database=world.database,
            engines=self.engine,
            handler=lambda name: handler,  # type: ignore[arg-type,return-value]
            renderer=lambda config: renderer if self.has_model else Renderer.from_folder(MODEL / "gone"),
            backend=backend,
            node=settings.node,
        )
        works: dict[Stage, Work] = {
            Stage.INIT: lambda claim: threads.submit(partial(init, claim)),
            Stage.RUN: lambda claim: loop.work(play(claim)),
            Stage.EVAL: lambda claim: threads.submit(partial(evaluate, claim)),
        }
        self.workers = {
            stage: StageWorker(
                stage,
                work,
                database=world.database,
                leases=leases,
                settings=settings,
                worker="w",
                publish=self.sent.extend,
                given_up=self.given_up.append,
            )
            for stage, work in works.items()
        }

    def perform(self, wakeup: Wakeup) -> list[Wakeup]:
        """Do what the message says; returns the messages that this gave."""
        num = len(self.sent)
        self.workers[wakeup.stage].perform(wakeup.episode_id, wakeup.attempt)
        return self.sent[num:]


class Saying:
    """An engine that calls the tool once, or hangs."""

    def __init__(self, renderer: Renderer) -> None:
        call = Message(role="assistant", content="", tool_calls=(ToolCall(name="t", arguments={}),))
        segments = renderer.segments([Message(role="user", content="Go."), call], ())
        self._call = tuple(token for segment in segments if segment.sampled for token in segment.ids)
        self.hangs_from_turn = 99
        self.num_asked = 0

    async def generate(
        self, claim: Claim, prompt_ids: list[int], *, request_id: str, stop_ids: tuple[int, ...], limit_s: float
    ) -> Generated:
        self.num_asked += 1
        if self.num_asked >= self.hangs_from_turn:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await asyncio.Event().wait()
            raise OutOfTime("the engine hangs")
        sampled = Sampled(
            ids=self._call,
            logprobs=tuple(-0.5 for _ in self._call),
            spans=(VersionSpan(version=0, start=0, end=len(self._call)),),
            finish_reason=FinishReason.STOP,
        )
        return Generated(sampled=sampled, engine="engine", latency_ms=1)


def handler(**arguments: Any) -> pytest.MarkDecorator:
    """The handler of a test's stages."""
    return pytest.mark.parametrize("stages", [arguments], indirect=True)


@pytest.fixture
def stages(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stages]:
    budgets = dict.fromkeys(("init_timeout_s", "eval_timeout_s", "episode_timeout_s"), BUDGET_S)
    _configure(world, **budgets)
    settings = Settings(data_dir=tmp_path, stage_grace_s=0.3, max_attempts=2, retry_backoff_s=0, engine_wait_s=0.3)
    leases = Leases(world.database, lease_s=5, heartbeat_s=0.05)
    loop = RunLoop()
    stages = Stages(world, Hanging(**getattr(request, "param", {})), leases, loop, settings)
    yield stages
    stages.handler.released.set()
    loop.close()
    leases.close()


def _configure(world: World, **rollout: Any) -> None:
    config = world.run.config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
    with world.database.begin() as conn:
        conn.execute(text("UPDATE run SET config = CAST(:config AS jsonb)"), {"config": config.model_dump_json()})


def stored(world: World, wakeup: Wakeup) -> Any:
    with world.database.begin() as conn:
        return conn.execute(text("SELECT * FROM episode WHERE id = :id"), {"id": wakeup.episode_id}).one()


@pytest.mark.parametrize("where", ["init", "call_tool", "eval"])
def test_an_exit_of_a_handler_is_a_failure_of_its_episode_alone(world: World, stages: Stages, where: str):
    stages.handler.leaves_in = where
    leaving, good = world.feed()[:2]
    for sent in (leaving, good):
        while sent.stage != {"init": Stage.INIT, "call_tool": Stage.RUN, "eval": Stage.EVAL}[where]:
            (sent,) = stages.perform(sent)
        if sent.episode_id == leaving.episode_id:
            stages.perform(sent)
            stages.handler.leaves_in = ""
    assert "SystemExit: 4" in stored(world, leaving).detail
    assert stored(world, leaving).failures == 1
    while sent.stage is not Stage.EVAL:
        (sent,) = stages.perform(sent)
    stages.perform(sent)
    assert stored(world, good).state == "SCORED"


@pytest.mark.parametrize("answer", [None, 17, {"a": 1}])
def test_a_tools_answer_that_is_no_text_is_named(world: World, stages: Stages, answer: object):
    stages.handler.answer = answer
    (sent,) = stages.perform(world.feed()[0])
    stages.perform(sent)
    found = stored(world, sent)
    assert found.state == "READY"
    assert found.detail == f"call_tool of calculator must return text, for t it gave {answer!r}"


def test_a_first_prompt_that_can_never_fit_is_not_tried_again(world: World, stages: Stages) -> None:
    _configure(world, max_row_tokens=2)
    (sent,) = stages.perform(world.feed()[0])
    assert stages.perform(sent) == []
    row = stored(world, sent)
    assert (row.state, row.outcome, row.failures) == ("FAILED", "handler_failed", 1)
    assert "rollout.max_row_tokens is 2" in row.detail


def test_what_a_machine_lacks_is_named_and_another_machine_goes_on(world: World, stages: Stages) -> None:
    (sent,) = stages.perform(world.feed()[0])
    stages.has_model = False
    assert stages.perform(sent) == [sent]
    row = stored(world, sent)
    assert (row.state, row.failures, row.claim_token) == ("READY", 1, None)
    assert row.detail.startswith("on worker w: ")
    assert "has no tokenizer.json: is it a model folder?" in row.detail
    stages.has_model = True
    (scored,) = stages.perform(sent)
    assert scored.stage is Stage.EVAL


@handler(hangs_in="init")
def test_init_that_hangs_is_interrupted_tried_again_and_fails_in_the_end(world: World, stages: Stages):
    wakeup = world.feed()[0]
    (again,) = stages.perform(wakeup)
    assert again == Wakeup(stage=Stage.INIT, episode_id=wakeup.episode_id, attempt=2)
    assert stages.perform(again) == []

    row = stored(world, wakeup)
    assert (row.state, row.outcome, row.reward, row.failures) == ("FAILED", "stage_timeout", None, 2)
    assert row.detail == "init of calculator did not end within 0.3 s"
    assert stages.given_up == []


@handler(hangs_in="eval", stubborn=True)
def test_eval_that_does_not_stop_is_given_up_and_what_it_makes_later_counts_for_nothing(world: World, stages: Stages):
    wakeup = world.sample(world.prepare(world.feed()[0]))
    assert stages.perform(wakeup) == [wakeup]
    assert stages.perform(wakeup) == []
    assert stages.given_up == [1, 2]

    stages.handler.released.set()
    row = stored(world, wakeup)
    assert (row.state, row.outcome, row.reward) == ("FAILED", "stage_timeout", None)


@handler(hangs_in="init")
def test_a_cancelled_episode_interrupts_init_at_the_next_heartbeat(world: World, stages: Stages):
    _configure(world, init_timeout_s=60.0)
    wakeup = world.feed()[0]
    performing = threading.Thread(target=stages.perform, args=(wakeup,))
    performing.start()
    assert stages.handler.started.wait(WITHIN_S)
    with world.database.begin() as conn:
        cancel.cancel_episodes(conn, [wakeup.episode_id], why="enough")
    performing.join(WITHIN_S)
    assert not performing.is_alive()
    assert stages.handler.stopped == ["init"]
    assert (stored(world, wakeup).state, stages.sent, stages.given_up) == ("CANCELLED", [], [])


@handler(hangs_in="eval")
def test_a_process_that_is_told_to_end_interrupts_eval_and_hands_it_back(world: World, stages: Stages):
    _configure(world, eval_timeout_s=60.0)
    wakeup = world.sample(world.prepare(world.feed()[0]))
    performing = threading.Thread(target=stages.perform, args=(wakeup,))
    performing.start()
    assert stages.handler.started.wait(WITHIN_S)
    stages.workers[Stage.EVAL].stop()
    performing.join(WITHIN_S)
    assert not performing.is_alive()
    row = stored(world, wakeup)
    assert (row.state, row.claim_token, row.failures, stages.sent) == ("SAMPLED", None, 0, [wakeup])


@handler(hangs_in="call_tool")
def test_a_tool_that_hangs_is_cut_off_and_the_turn_that_called_it_is_scored(world: World, stages: Stages):
    started = time.monotonic()
    (ready,) = stages.perform(world.feed()[0])
    (sampled,) = stages.perform(ready)
    row = stored(world, ready)
    assert (row.state, row.outcome, row.num_turns, row.failures) == ("SAMPLED", "agent_timeout", 1, 0)
    assert stages.perform(sampled) == []
    assert stored(world, ready).reward == 1.0
    assert time.monotonic() - started < WITHIN_S


@handler()
@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_request_that_hangs_ends_the_episode_with_the_turns_it_has(world: World, stages: Stages, num_turns: int):
    stages.engine.hangs_from_turn = num_turns + 1
    (ready,) = stages.perform(world.feed()[0])
    (following,) = stages.perform(ready)
    row = stored(world, ready)
    if num_turns:
        assert (row.state, row.outcome, row.num_turns) == ("SAMPLED", "agent_timeout", 1)
    else:
        assert following == ready
        assert (row.state, row.outcome, row.failures) == ("READY", None, 1)
        assert row.detail.startswith("no turn: ")
