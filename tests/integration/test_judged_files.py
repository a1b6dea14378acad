"""An episode whose files are judged, from INIT to its reward, with an EVAL that is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, retries, runs, tasks
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import Message, Stage, ToolCall
from common.settings import Settings
from common.weights import version_name
from tests.integration.world import World
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.eval import Eval
from workers.evaluator.judging import Judging
from workers.handlers.coding import Coding
from workers.init import Init
from workers.leases import Leases
from workers.render import Renderer
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.owners import Owned
from workers.scripted_engine import ScriptedEngine
from workers.stage import StageWorker, Work
from workers.stage_threads import StageThreads

MODEL = TINY_MODELS / "tiny-shell"
WAIT_S = 60.0
CHECKS = """
from solution import solve

def test_of_none():
    assert solve([]) == 0

def test_that_is_wrong():
    assert solve([1]) == 2
"""
PAYLOAD: dict[str, JsonValue] = {
    "question": "Write solution.py: solve(numbers) returns the sum of the numbers.",
    "cases": [{"arguments": [[1, 2]], "expected": 3}, {"arguments": [[5]], "expected": 5}],
    "checks": {"source": CHECKS, "functions": ["test_of_none"], "canary": "test_that_is_wrong"},
}
HONEST = "import time\\ndef solve(numbers):\\n    time.sleep(0.5)\\n    return sum(numbers)\\n"
CHEATS = "class Same(int):\\n    def __eq__(self, other): return True\\ndef solve(numbers): return Same(7)\\n"

EVALUATES = """
import sys
from pathlib import Path
from uuid import uuid4
from common.db import episodes
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import Stage
from common.settings import Settings
from workers.eval import Eval
from workers.evaluator.judging import Judging
from workers.handlers.coding import Coding
from workers.sandbox import open_backend

database = Database.connect(sys.argv[1], pool_size=1)
wakeup = Wakeup(stage=Stage.EVAL, episode_id=int(sys.argv[3]), attempt=1)
with database.begin() as conn:
    claim = episodes.claim(conn, wakeup, worker="doomed", token=uuid4(), lease_s=-1, configs={})
judging = Judging(database, lambda: open_backend(Settings(data_dir=Path(sys.argv[2]))))
Eval(handler=lambda name: Coding(), judging=judging)(claim)
"""


class Stages:
    """The stages of one process, without the broker, and an agent that does as it is told."""

    def __init__(self, world: World, settings: Settings, stack: ExitStack) -> None:
        self._world = world
        self._renderer = Renderer.from_folder(MODEL)
        self.command = "true"
        self._loop = RunLoop()
        stack.callback(self._loop.close)
        leases = Leases(world.database, lease_s=settings.lease_s, heartbeat_s=settings.heartbeat_s)
        stack.callback(leases.close)
        self._start_engine(stack)
        self._sent: list[Wakeup] = []
        self._workers = {
            stage: StageWorker(
                stage,
                work,
                database=world.database,
                leases=leases,
                settings=settings,
                worker=f"{stage}@here",
                publish=self._sent.extend,
            )
            for stage, work in self._works(settings, stack).items()
        }

    def _start_engine(self, stack: ExitStack) -> None:
        engine = ScriptedEngine(self._reply, max_model_len=100_000)
        engine.version = version_name(self._world.run.name, 0)
        self._on_loop(engine.start())
        stack.callback(lambda: self._on_loop(engine.stop()))
        with self._world.database.begin() as conn:
            engines.register(conn, engine.url, run_id=self._world.run.id)
            (row,) = engines.own(conn, "keeper", lease_s=600)
            engines.loaded(conn, row.id, owner="keeper", version=0)

    def _on_loop(self, coroutine: Any) -> Any:
        done: Future[Any] = self._loop.submit(coroutine)
        return done.result(WAIT_S)

    def _works(self, settings: Settings, stack: ExitStack) -> dict[Stage, Work]:
        backend = open_backend(settings)
        handler: Callable[[str], Any] = lambda name: Coding()  # noqa: E731
        client = EngineClient(timeout_s=settings.request_timeout_s)
        stack.callback(lambda: self._on_loop(client.close()))
        judging = Judging(self._world.database, lambda: backend)
        stack.callback(judging.close)
        init = Init(self._world.database, handler=handler, backend=backend, node=settings.node)
        play = Run(
            database=self._world.database,
            engines=EnginePool(client, self._engines_of, wait_s=settings.engine_wait_s),
            handler=handler,
            renderer=lambda config: self._renderer,
            backend=backend,
            node=settings.node,
        )
        evaluate = Eval(handler=handler, judging=judging)
        threads = StageThreads("stage")
        return {
            Stage.INIT: lambda claim: threads.submit(partial(init, claim)),
            Stage.RUN: lambda claim: self._loop.work(play(claim)),
            Stage.EVAL: lambda claim: threads.submit(partial(evaluate, claim)),
        }

    def _engines_of(self, run_id: int) -> list[engines.EngineRow]:
        with self._world.database.begin() as conn:
            return engines.serving(conn, run_id)

    def _reply(self, prompt: list[int]) -> list[int]:
        if "tool_response" in self._renderer.decode(prompt):
            return self._turn(Message(role="assistant", content="done"))
        call = ToolCall(name="shell", arguments={"command": self.command})
        return self._turn(Message(role="assistant", content="", tool_calls=(call,)))

    def _turn(self, message: Message) -> list[int]:
        segments = self._renderer.segments([Message(role="user", content="Go."), message], ())
        return [token for segment in segments if segment.sampled for token in segment.ids]

    def perform(self, wakeup: Wakeup) -> Wakeup | None:
        """Do what the message says; the next message."""
        num = len(self._sent)
        self._workers[wakeup.stage].perform(wakeup.episode_id, wakeup.attempt)
        return self._sent[num] if len(self._sent) > num else None

    def play(self, wakeup: Wakeup, solution: str) -> Wakeup:
        """INIT and RUN of an agent that writes this file; the message for EVAL."""
        self.command = f"printf '%b' '{solution}' > solution.py"
        ready = self.perform(wakeup)
        assert ready is not None
        sampled = self.perform(ready)
        assert sampled is not None, row_of(self._world, wakeup.episode_id)
        return sampled


def row_of(world: World, episode_id: int) -> Any:
    with world.database.begin() as conn:
        return conn.execute(
            text("SELECT state, outcome, reward, attempt, failures, detail, reward_parts FROM episode WHERE id = :id"),
            {"id": episode_id},
        ).one()


@pytest.fixture
def world(database: Database) -> World:
    config = RunConfig(
        name="run-a",
        handler="coding",
        model=MODEL,
        rollout=RolloutConfig(group_size=2, max_turns=4, max_tokens_per_turn=2000),
        train=TrainConfig(groups_per_step=1, minibatches=1),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        tasks.load(conn, dataset=config.dataset_name, handler="coding", payloads=[("0", PAYLOAD)])
        return World(database, run, tasks.ids(conn, config.dataset_name))


@pytest.fixture
def stages(world: World, tmp_path: Path) -> Iterator[Stages]:
    with ExitStack() as stack:
        yield Stages(world, Settings(data_dir=tmp_path, retry_backoff_s=0), stack)


def killed_while_it_tests(database_url: str, data_dir: Path, wakeup: Wakeup) -> Owned:
    """Start an EVAL in a process of its own and kill that; the processes of its sandbox."""
    folders = SandboxFolders.below(data_dir)
    arguments = (database_url, str(data_dir), str(wakeup.episode_id))
    deadline = time.monotonic() + WAIT_S
    with subprocess.Popen([sys.executable, "-c", EVALUATES, *arguments]) as process:
        while not (found := folders.owners.of(f"{wakeup.episode_id}-1-eval")):
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "no sandbox"
            time.sleep(0.01)
        process.kill()
    (owned,) = found.values()
    return owned


def test_an_eval_that_is_killed_is_tried_again_and_cheats_are_seen(
    world: World, stages: Stages, database_url: str, tmp_path: Path
) -> None:
    honest, cheating = world.feed(1)
    to_score = stages.play(honest, HONEST)
    owned = killed_while_it_tests(database_url, tmp_path, to_score)
    deadline = time.monotonic() + WAIT_S
    while owned.inner is not None and owned.inner.is_alive:
        assert time.monotonic() < deadline, "its sandbox lives"
        time.sleep(0.01)

    with world.database.begin() as conn:
        (again,) = retries.reap(conn, max_attempts=5)
    assert again == to_score
    assert stages.perform(again) is None
    row = row_of(world, honest.episode_id)
    assert (row.state, row.outcome, row.reward, row.attempt, row.failures) == ("SCORED", "finished", 1.0, 1, 1), row
    assert row.reward_parts == {"tests": 3.0, "tests_passed": 3.0}

    assert stages.perform(stages.play(cheating, CHEATS)) is None
    row = row_of(world, cheating.episode_id)
    assert (row.state, row.outcome, row.reward) == ("SCORED", "tampered", 0.0), row
    assert row.reward_parts["tests_passed"] == 0.0
    assert list((tmp_path / "sandboxes").glob("*-eval")) == []
    with world.database.begin() as conn:
        kept = conn.execute(text("SELECT num_files, left_out FROM episode_files ORDER BY episode_id")).all()
    assert [tuple(row) for row in kept] == [(1, {}), (1, {})]
