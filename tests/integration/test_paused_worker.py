"""A worker process that stands still past its lease, or hangs for good, and goes on when another has its episodes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs, tasks, versions
from common.db.session import Database
from common.episode import Message, ToolCall
from common.weights import Published, version_name
from tests.integration.processes import Processes
from tests.integration.world import World
from workers.handlers.shell import Shell
from workers.render import Renderer
from workers.run_loop import RunLoop
from workers.scripted_engine import ScriptedEngine

MODEL = TINY_MODELS / "tiny-shell"
GROUP_SIZE = 2
LEASE_S = 2.0
START_S = 60.0
"""How long processes may take to import and to connect, on a machine that is busy with other tests."""
THINKING, TOKEN_S = 400, 0.1
"""Tokens of a turn that lasts until the engine is told to hurry, and how long each of them takes until then."""
HANGING_HANDLER = '''
import time

from workers.handlers.shell import Shell


class Stuck(Shell):
    """Its evaluation waits in C, where nothing can be raised."""

    name = "stuck"

    def eval(self, payload, transcript):
        time.sleep(600)
'''


def make_world(database: Database, handler: str, rollout: RolloutConfig) -> World:
    config = RunConfig(
        name="run-a", handler=handler, model=MODEL, rollout=rollout, train=TrainConfig(groups_per_step=2, minibatches=1)
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        payloads = ((str(n), payload) for n, payload in enumerate(Shell().tasks(seed=0, num_tasks=1)))
        tasks.load(conn, dataset=config.dataset_name, handler=handler, payloads=payloads)
        versions.publish(conn, run.id, 0, Published(location=str(MODEL), manifest_sha256="0" * 64))
        return World(database, run, tasks.ids(conn, config.dataset_name))


@contextmanager
def engine_of(world: World, renderer: Renderer) -> Iterator[ScriptedEngine]:
    """An engine on a loop of its own. Its agent runs `ls`, and then thinks for as long as `token_s` makes it."""
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="shell", arguments={"command": "ls"}),))
    segments = renderer.segments([Message(role="user", content="Go."), call], ())
    look = [token for segment in segments if segment.sampled for token in segment.ids]

    def reply(prompt: list[int]) -> list[int]:
        is_first = '"ls"' not in renderer.decode(prompt)
        return look if is_first else [*[ord("x")] * THINKING, renderer.close_id]

    loop = RunLoop()
    engine = ScriptedEngine(reply, token_s=TOKEN_S, max_model_len=100_000)
    engine.version = version_name(world.run.name, 0)
    loop.submit(engine.start()).result(10)
    with world.database.begin() as conn:
        engines.register(conn, engine.url, run_id=world.run.id)
    try:
        yield engine
    finally:
        loop.submit(engine.stop()).result(10)
        loop.close()


def ask(world: World, query: str, **params: Any) -> Any:
    with world.database.begin() as conn:
        return conn.execute(text(query), params).scalar_one()


def environment(database_url: str, broker_url: str, folder: Path, **settings: str) -> dict[str, str]:
    return {
        "ROLLMILL_DATABASE_URL": database_url,
        "ROLLMILL_BROKER_URL": broker_url,
        "ROLLMILL_DATA_DIR": str(folder / "data"),
        "ROLLMILL_LEASE_S": f"{LEASE_S:g}",
        "ROLLMILL_HEARTBEAT_S": "0.4",
        "ROLLMILL_RESEND_AFTER_S": "1",
        "ROLLMILL_REAP_EVERY_S": "0.2",
        "PYTHONPATH": str(folder),
        **settings,
    }


AT_WORK = "SELECT count(*) FROM episode WHERE claim_worker = :worker AND num_turns = 1"
FINAL = "SELECT count(*) FROM episode WHERE state IN ('SCORED', 'FAILED', 'CANCELLED')"


def check_tried_once_more(world: World, *, taken_back: int) -> None:
    """Each episode lost its lease once, by the event `taken_back`, was played once more and scored once."""
    why = "lease_lost: the worker died or stalled: its lease ran out"
    assert ask(world, "SELECT why FROM episode_event WHERE id = :id", id=taken_back) == why
    scored = "SELECT count(*) FROM episode WHERE state = 'SCORED' AND attempt = 2 AND failures = 1 AND num_turns = 2"
    assert ask(world, scored) == GROUP_SIZE
    assert ask(world, "SELECT count(*) FROM episode_event WHERE to_state = 'SCORED'") == GROUP_SIZE
    assert ask(world, "SELECT count(*) FROM turn WHERE attempt = 2") == 2 * GROUP_SIZE
    destroyed_early = (
        "SELECT count(*) FROM sandbox s JOIN episode e ON e.id = s.episode_id"
        " WHERE s.attempt = e.attempt AND s.destroyed_at < e.finished_at"
    )
    assert ask(world, destroyed_early) == 0


def test_a_worker_that_was_paused_past_its_lease_writes_nothing_more(
    database: Database, database_url: str, valkey_url: str, tmp_path: Path
) -> None:
    rollout = RolloutConfig(group_size=GROUP_SIZE, max_turns=3, max_tokens_per_turn=THINKING + 1)
    world = make_world(database, "shell", rollout)
    renderer = Renderer.from_folder(MODEL)
    sandboxes = tmp_path / "data" / "sandboxes"
    with (
        engine_of(world, renderer) as engine,
        Processes(tmp_path, environment(database_url, valkey_url, tmp_path)) as processes,
    ):
        world.feed()
        paused = processes.start("paused", "workers.fleet", "run")
        for stage in ("init", "eval"):
            processes.start(stage, "workers.fleet", stage)
        processes.start("reaper", "workers.reaper")
        name = f"run@{socket.gethostname()}:{paused.pid}"
        processes.until(
            lambda: ask(world, AT_WORK, worker=name) == GROUP_SIZE, within_s=START_S, what="a turn of each episode"
        )
        os.kill(paused.pid, signal.SIGSTOP)
        stored = ask(world, "SELECT count(*) FROM turn")
        # Its requests are answered now, so that it wakes with turns in its hands that it would store.
        engine.token_s = 0.0
        processes.until(lambda: not engine.open, within_s=START_S, what="answers to the paused worker")
        engine.token_s = TOKEN_S

        other = processes.start("other", "workers.fleet", "run")
        name_of_other = f"run@{socket.gethostname()}:{other.pid}"
        processes.until(
            lambda: ask(world, AT_WORK, worker=name_of_other) == GROUP_SIZE,
            within_s=START_S,
            what="another worker that has both episodes",
        )
        taken_back = ask(world, "SELECT max(id) FROM episode_event WHERE worker = :worker", worker=name)
        os.kill(paused.pid, signal.SIGCONT)
        processes.until(
            lambda: processes.log("paused").count("gave up stage=run") == GROUP_SIZE,
            within_s=START_S,
            what="the paused worker sees that its episodes are gone",
        )
        assert ask(world, FINAL) == 0
        assert len(list(sandboxes.iterdir())) == GROUP_SIZE
        engine.token_s = 0.0
        processes.until(lambda: ask(world, FINAL) == GROUP_SIZE, within_s=START_S, what="all episodes final")
        processes.until(lambda: not list(sandboxes.iterdir()), within_s=START_S, what="no sandboxes left")
        assert paused.poll() is None

    late = {
        "events": ask(
            world, "SELECT count(*) FROM episode_event WHERE worker = :worker AND id > :id", worker=name, id=taken_back
        ),
        "turns": ask(world, "SELECT count(*) FROM turn WHERE attempt = 1") - stored,
        "claims": ask(world, "SELECT count(*) FROM episode WHERE claim_token IS NOT NULL"),
    }
    assert late == {"events": 0, "turns": 0, "claims": 0}
    check_tried_once_more(world, taken_back=taken_back)


def test_a_process_in_which_half_the_work_hangs_hands_its_claims_back_and_ends(
    database: Database, database_url: str, valkey_url: str, tmp_path: Path
) -> None:
    (tmp_path / "stuck_handler.py").write_text(HANGING_HANDLER)
    handler = "stuck_handler:Stuck"
    world = make_world(database, handler, RolloutConfig(group_size=GROUP_SIZE, eval_timeout_s=1.0))
    with database.begin() as conn:
        engines.register(conn, "http://engine", run_id=world.run.id)
    for wakeup in world.feed():
        world.sample(world.prepare(wakeup))
    env = environment(database_url, valkey_url, tmp_path, ROLLMILL_STAGE_GRACE_S="0.5", ROLLMILL_MAX_ATTEMPTS="9")
    with Processes(tmp_path, env) as processes:
        processes.start("reaper", "workers.reaper")
        hanging = processes.start("eval", "workers.fleet", "eval", "--concurrency", "2")
        processes.until(lambda: hanging.poll() is not None, within_s=START_S, what="the end of the process")
        assert hanging.returncode == 1
        assert "this process hands its claims back and ends, so that it is started anew" in processes.log("eval")
        assert "1 works hang in it" in processes.log("eval")
    why = "stage_timeout: eval of stuck_handler:Stuck did not end within 1 s"
    assert ask(world, "SELECT count(*) FROM episode_event WHERE why = :why", why=why) >= 1
    standing = "SELECT count(*) FROM episode WHERE state = 'SAMPLED' AND claim_token IS NULL AND reward IS NULL"
    assert ask(world, standing) == GROUP_SIZE
