"""Stopping a run under a working fleet: real stages, sandboxes with running commands, an engine that samples."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, run_control, runs, sandboxes, tasks
from common.db.episodes import Wakeup
from common.db.session import Database
from common.episode import Message, Stage, ToolCall
from common.errors import EpisodeError, LeaseLost
from common.outcomes import Outcome
from common.settings import Settings
from common.weights import version_name
from tests.integration.world import World
from workers.engine_client import EngineClient
from workers.engine_pool import EnginePool
from workers.handlers.shell import SHELL, Shell
from workers.init import Init
from workers.leases import Leases
from workers.reaper import Reaper
from workers.render import Renderer
from workers.run import Run
from workers.run_loop import RunLoop
from workers.sandbox import open_backend
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import OPEN, SandboxSpec
from workers.sandbox.restricted import Restricted
from workers.scripted_engine import ScriptedEngine
from workers.stage import StageWorker

NUM_GROUPS, GROUP_SIZE = 25, 8
SLEEP_S = 9.0 + os.getpid() / 1e8
"""Seconds that commands sleep: a number that finds the processes of this test alone."""
MODEL = TINY_MODELS / "tiny-shell"


class Fleet:
    """INIT and RUN of one process, as `workers.fleet` wires them, without the broker."""

    def __init__(self, world: World, data_dir: Path, renderer: Renderer, stack: ExitStack) -> None:
        self.database = world.database
        settings = Settings(data_dir=data_dir)
        self.backend = open_backend(settings)
        self.reaper = Reaper(world.database, settings, self.backend, lambda wakeups: None)
        leases = Leases(world.database, lease_s=settings.lease_s, heartbeat_s=settings.heartbeat_s)
        stack.callback(leases.close)
        self.loop = RunLoop()
        stack.callback(self.loop.close)
        client = EngineClient(timeout_s=settings.request_timeout_s)
        stack.callback(lambda: self.loop.submit(client.close()).result(10))
        pool = EnginePool(client, self._engines_of, wait_s=settings.engine_wait_s)
        play = Run(
            database=world.database,
            engines=pool,
            handler=lambda name: Shell(),
            renderer=lambda folder: renderer,
            backend=self.backend,
            node=settings.node,
        )
        init = Init(world.database, handler=lambda name: Shell(), backend=self.backend, node=settings.node)
        self._init_threads = stack.enter_context(ThreadPoolExecutor(8))
        self._threads = stack.enter_context(ThreadPoolExecutor(NUM_GROUPS * GROUP_SIZE))
        self._delivered: list[Future[None]] = []
        self._workers = {
            stage: StageWorker(
                stage,
                work,
                database=world.database,
                leases=leases,
                settings=settings,
                worker=f"{stage}@here",
                publish=self.deliver,
            )
            for stage, work in (
                (Stage.INIT, lambda claim: self._init_threads.submit(init, claim)),
                (Stage.RUN, lambda claim: self.loop.submit(play(claim))),
            )
        }

    def _engines_of(self, run_id: int) -> list[engines.EngineRow]:
        with self.database.begin() as conn:
            return engines.serving(conn, run_id)

    def deliver(self, wakeups: list[Wakeup]) -> None:
        """Do what the messages say."""
        for wakeup in wakeups:
            if (worker := self._workers.get(wakeup.stage)) is not None:
                self._delivered.append(self._threads.submit(worker.perform, wakeup.episode_id, wakeup.attempt))

    @property
    def is_idle(self) -> bool:
        """Whether no message is being worked on. Raises what went wrong with one."""
        return all(delivered.done() and delivered.result() is None for delivered in self._delivered)


@pytest.fixture
def world(database: Database) -> World:
    config = RunConfig(
        name="run-a",
        handler="shell",
        model=MODEL,
        rollout=RolloutConfig(group_size=GROUP_SIZE, max_turns=50, max_tokens_per_turn=1000),
        train=TrainConfig(groups_per_step=NUM_GROUPS),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        payloads = ((str(n), payload) for n, payload in enumerate(Shell().tasks(seed=0, num_tasks=NUM_GROUPS)))
        tasks.load(conn, dataset=config.dataset_name, handler="shell", payloads=payloads)
        return World(database, run, tasks.ids(conn, config.dataset_name))


@contextmanager
def engine_of(world: World, reply: Callable[[list[int]], list[int]], *, token_s: float) -> Iterator[ScriptedEngine]:
    """An engine on a loop of its own that serves the run's version 0."""
    loop = RunLoop()
    engine = ScriptedEngine(reply, token_s=token_s, max_model_len=100_000)
    engine.version = version_name(world.run.name, 0)
    loop.submit(engine.start()).result(10)
    with world.database.begin() as conn:
        engines.register(conn, engine.url, run_id=world.run.id)
        (row,) = engines.own(conn, "keeper", lease_s=600)
        engines.loaded(conn, row.id, owner="keeper", version=0)
    try:
        yield engine
    finally:
        loop.submit(engine.stop()).result(10)
        loop.close()


def calls(renderer: Renderer, command: str) -> list[int]:
    """The ids of a turn that runs a command, close token included."""
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="shell", arguments={"command": command}),))
    segments = renderer.segments([Message(role="user", content="Go."), call], ())
    return [token for segment in segments if segment.sampled for token in segment.ids]


def sleeping() -> list[int]:
    """Processes that a command of this test left: bubblewrap, the shell in it, or what that runs."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and str(SLEEP_S) in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def until(reached: Callable[[], bool], *, within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)


def ask(world: World, query: str) -> Any:
    with world.database.begin() as conn:
        return conn.execute(text(query)).scalar_one()


def test_a_run_with_200_episodes_at_work_is_stopped_within_seconds(world: World, tmp_path: Path):
    renderer = Renderer.from_folder(MODEL)
    look, sleep, think = calls(renderer, "ls"), calls(renderer, f"sleep {SLEEP_S}"), [ord("x")] * 900
    first = renderer.first_prompt([Message(role="user", content="Go.")], [SHELL])
    turns = itertools.count()

    def reply(prompt: list[int]) -> list[int]:
        if prompt.count(renderer.close_id) == first.count(renderer.close_id):
            return look
        return sleep if next(turns) % 2 else think

    with ExitStack() as stack:
        engine = stack.enter_context(engine_of(world, reply, token_s=0.1))
        fleet = Fleet(world, tmp_path, renderer, stack)
        fleet.deliver(world.feed(NUM_GROUPS))
        until(
            lambda: ask(world, "SELECT count(*) FROM episode WHERE num_turns > 0") == 200,
            within_s=120,
            what="a turn of each episode",
        )
        until(lambda: len(engine.open) > 50 and len(sleeping()) > 50, within_s=30, what="requests and commands")
        turns_before = ask(world, "SELECT count(*) FROM turn")

        started = time.monotonic()
        with world.database.begin() as conn:
            stopped = run_control.stop(conn, "run-a", why="enough")
        answered_s = time.monotonic() - started
        assert (stopped.episodes.num_cancelled, stopped.episodes.num_at_work) == (200, 200)
        assert ask(world, "SELECT count(*) FROM episode WHERE state = 'CANCELLED' AND claim_token IS NULL") == 200
        assert ask(world, "SELECT count(*) FROM episode_group WHERE state = 'DROPPED'") == NUM_GROUPS

        fleet.reaper.round()
        until(lambda: fleet.is_idle and not engine.open and not sleeping(), within_s=15, what="all work stopped")
        until(lambda: _is_swept(fleet, world, tmp_path), within_s=15, what="no sandbox left")
        stopped_s = time.monotonic() - started
        assert ask(world, "SELECT count(*) FROM turn t JOIN turn_tokens k ON k.turn_id = t.id") >= turns_before >= 200
        assert ask(world, "SELECT count(*) FROM episode_event WHERE to_state = 'CANCELLED'") == 200
    assert answered_s < 2
    assert stopped_s < 15


def _is_swept(fleet: Fleet, world: World, folder: Path) -> bool:
    """Whether a further round of the reaper leaves no sandbox."""
    fleet.reaper.round()
    left = ask(world, "SELECT count(*) FROM sandbox WHERE destroyed_at IS NULL")
    return left == 0 and not list((folder / "sandboxes").iterdir())


def test_a_sandbox_made_after_its_episode_was_cancelled_and_swept_is_removed_by_its_maker(world: World, tmp_path: Path):
    claim = world.must_claim(world.feed()[0])

    class CancelledMeanwhile(FolderBackend):
        """The cancellation and the sweep fall between the sandbox's row and its folder."""

        def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
            with world.database.begin() as conn:
                run_control.stop(conn, "run-a", why="enough")
            Reaper(world.database, Settings(), self, lambda wakeups: None).round()
            assert ask(world, "SELECT count(*) FROM sandbox WHERE destroyed_at IS NULL") == 0
            super().create(handle, files, spec)

    backend = CancelledMeanwhile(SandboxFolders.below(tmp_path), Restricted())
    with pytest.raises(LeaseLost):
        Init(world.database, handler=lambda name: Shell(), backend=backend, node=Settings().node)(claim)
    assert list((tmp_path / "sandboxes").iterdir()) == []


def test_a_sandbox_that_cannot_be_removed_yet_is_tried_again_and_keeps_no_other_from_it(world: World, tmp_path: Path):
    class Busy(FolderBackend):
        """A command still writes into the first sandbox while it is removed."""

        busy = True

        def destroy(self, handle: str) -> None:
            if self.busy and handle == "1-1":
                raise EpisodeError(Outcome.SANDBOX_FAILED, f"cannot remove sandbox {handle}: not empty")
            super().destroy(handle)

    backend = Busy(SandboxFolders.below(tmp_path), Restricted())
    reaper = Reaper(world.database, Settings(), backend, lambda wakeups: None)
    for wakeup in world.feed()[:2]:
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            handle = backend.handle(claim.episode_id, 1)
            sandboxes.record(conn, claim, backend="b", node=socket.gethostname(), handle=handle)
        (tmp_path / "sandboxes" / handle).mkdir()
    with world.database.begin() as conn:
        run_control.stop(conn, "run-a", why="enough")
    reaper.round()
    assert [folder.name for folder in (tmp_path / "sandboxes").iterdir()] == ["1-1"]
    backend.busy = False
    reaper.round()
    assert list((tmp_path / "sandboxes").iterdir()) == []
    assert ask(world, "SELECT count(*) FROM sandbox WHERE destroyed_at IS NULL") == 0
