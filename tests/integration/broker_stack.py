"""A private RabbitMQ node with its folder, and processes of the loop beside it that a test starts and kills."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kombu.connection import Connection

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, groups, runs, tasks, turns, versions
from common.db.episodes import Wakeup, move
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState
from common.outcomes import Outcome
from common.queues import QueueKind
from common.settings import Settings
from common.weights import WeightStore
from deploy.broker_queues import make_queues
from tests.integration.world import World, make_turn
from tests.version_files import writing

ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not {what} after {timeout_s} s"
        time.sleep(0.05)


def with_user(url: str, user: str, password: str) -> str:
    """The broker URL with another user."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"


@dataclass(kw_only=True)
class Processes:
    """Processes with a log each; all are killed at the end of the block."""

    folder: Path
    env: Mapping[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def start(self, name: str, *arguments: str, **more_env: str) -> subprocess.Popen[bytes]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("ROLLMILL_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env={**own, "OMP_NUM_THREADS": "1", **self.env, **more_env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.running[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        """The ends of all logs, for a failing test's message."""
        return "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self.running)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A virtual host of a private RabbitMQ node."""

    url: str
    data_dir: Path

    def settings(self, kind: QueueKind, **more: object) -> Settings:
        return Settings.model_validate(
            {"broker_url": self.url, "broker_queues": kind, "data_dir": self.data_dir, **more}
        )

    def fresh_queues(self, kind: QueueKind) -> Settings:
        """Empty queues of the kind, and settings that name them."""
        given = self.settings(kind)
        # A fleet that was killed a moment ago may still count as a consumer.
        make_queues(given, recreate=True, force=True)
        return given

    def env(self, kind: QueueKind, database_url: str, folder: Path) -> dict[str, str]:
        return {
            "ROLLMILL_DATABASE_URL": database_url,
            "ROLLMILL_BROKER_URL": self.url,
            "ROLLMILL_BROKER_QUEUES": kind,
            "ROLLMILL_BROKER_CONSUMER_TIMEOUT_S": "86400",
            "ROLLMILL_DATA_DIR": str(folder),
        }

    def num_messages(self, queue: str) -> int:
        """Ready in the queue."""
        with Connection(self.url) as connection, connection.channel() as channel:
            found: int = channel.queue_declare(queue, passive=True).message_count
            return found


def run_config(name: str, *, handler: str = "workers.handlers.noop:Noop", num_versions: int = 2) -> RunConfig:
    return RunConfig(
        name=name,
        handler=handler,
        model=TINY_MODELS / "tiny-shell",
        num_tasks=20,
        rollout=RolloutConfig(group_size=2, max_turns=1),
        train=TrainConfig(groups_per_step=2, minibatches=1, num_versions=num_versions),
    )


def open_run(database: Database, config: RunConfig, *, engine_url: str, weights: Path) -> Run:
    """A run with an engine and its start weights."""
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, engine_url, run_id=run.id)
    published = WeightStore(weights).publish(
        run.name, 0, writing("model.safetensors", (config.model / "model.safetensors").read_bytes())
    )
    with database.begin() as conn:
        versions.publish(conn, run.id, 0, published)
    return run


def sampled_episode(database: Database, *, handler: str) -> Wakeup:
    """An episode of two in a group that waits for EVAL."""
    config = run_config("run-a", handler=handler)
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        engines.register(conn, "http://127.0.0.1:9", run_id=run.id)
        tasks.load(conn, dataset="tasks", handler=handler, payloads=[("0", {"number": 0})])
        world = World(database, run, tasks.ids(conn, "tasks"))
    with database.begin() as conn:
        (first, _) = groups.create(conn, run_id=run.id, task_ids=world.task_ids, size=2)
    claim = world.must_claim(world.prepare(first))
    with database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
        moved = move(conn, claim, EpisodeState.SAMPLED, why="played", outcome=Outcome.FINISHED)
    assert moved is not None
    return moved
