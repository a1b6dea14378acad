"""Plays one way to train to its end, for benchmarks/async_speedup.py: coupled in one loop, or through the pipeline."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import text

from benchmarks.coupled import train_coupled
from benchmarks.tailed_engine import LONG_TOKENS, MEAN_TOKENS, MODEL, drawn_tokens
from benchmarks.timed_policy import TimedPolicy
from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, run_control, runs
from common.db.run_lock import RunLock
from common.db.runs import DataCursor
from common.db.session import Database
from common.errors import SetupError
from common.weights import WeightStore
from deploy.ports import HOST
from trainer.checkpoint import CheckpointStore
from trainer.loop import Trainer
from workers.feeder import next_tasks

NUM_TASKS = 2000
LIVE_TIMEOUT_S = 120.0
POLL_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What every way trains, and how long things take."""

    num_versions: int
    groups_per_step: int
    group_size: int
    token_s: float
    """From token to token."""
    load_s: float
    """To load weights into the engine."""

    @property
    def batch(self) -> int:
        """Episodes of a training step, and requests that the engine decodes at once."""
        return self.groups_per_step * self.group_size

    @property
    def step_s(self) -> float:
        """A training step: as long as the mean episode."""
        return MEAN_TOKENS * self.token_s


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train with one seed, and its engine."""

    max_staleness: int | None
    """None = coupled."""
    late_groups: Literal["drop", "wait"] = "drop"
    seed: int
    port: int

    @property
    def kind(self) -> str:
        if self.max_staleness is None:
            return "coupled"
        return f"staleness-{self.max_staleness}" + ("-wait" if self.late_groups == "wait" else "")

    @property
    def name(self) -> str:
        return f"{self.kind}-seed-{self.seed}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a way."""

    way: Way
    seconds: float
    """From the first task to the last version in the engine, or published."""
    sampled_tokens: int
    trained_tokens: int
    long_episodes: int
    """Trained ones of the tail."""
    dropped: Counter[str]
    """Reason -> groups."""
    lags: Counter[int]
    """Versions between an episode's oldest token and the step that trained it -> episodes."""


def run_config(way: Way, shape: Shape) -> RunConfig:
    return RunConfig(
        name=way.name,
        handler="benchmarks.tailed_engine:NumberedTask",
        model=MODEL,
        num_tasks=NUM_TASKS,
        seed=way.seed,
        rollout=RolloutConfig(group_size=shape.group_size, max_turns=1, max_tokens_per_turn=480, episode_timeout_s=600),
        train=TrainConfig(
            groups_per_step=shape.groups_per_step,
            num_versions=shape.num_versions,
            max_staleness=way.max_staleness or 0,
            late_groups=way.late_groups if way.max_staleness else "wait",
        ),
    )


def batches(seed: int, shape: Shape) -> list[list[int]]:
    """Numbers of the tasks of each training step, in the feeder's order, where no group is dropped."""
    numbers, _ = next_tasks(
        range(NUM_TASKS), DataCursor(epoch=0, index=0), num=shape.num_versions * shape.groups_per_step, seed=seed
    )
    return [numbers[start : start + shape.groups_per_step] for start in range(0, len(numbers), shape.groups_per_step)]


def lengths(numbers: list[int], seed: int, shape: Shape) -> list[int]:
    """Tokens of each episode of these tasks."""
    return [drawn_tokens(seed, number, sibling) for number in numbers for sibling in range(shape.group_size)]


def synchronous_s(seed: int, shape: Shape) -> float:
    """What the synchronous ways would take if nothing but the longest episodes, the steps and the loads took time."""
    longest = sum(max(lengths(batch, seed, shape)) for batch in batches(seed, shape))
    return longest * shape.token_s + shape.num_versions * (shape.step_s + shape.load_s)


def play_coupled(way: Way, shape: Shape, policy: TimedPolicy, *, data_dir: Path) -> Trained:
    """In one loop, of this process."""
    config = run_config(way, shape)
    played = batches(way.seed, shape)
    seconds = asyncio.run(
        train_coupled(config, policy, url=way.url, weights_dir=data_dir / "coupled-weights", played=played)
    )
    tokens = [length for batch in played for length in lengths(batch, way.seed, shape)]
    return Trained(
        way=way,
        seconds=seconds,
        sampled_tokens=_sampled_tokens(way),
        trained_tokens=sum(tokens),
        long_episodes=sum(length >= LONG_TOKENS for length in tokens),
        dropped=Counter(),
        lags=Counter({0: len(tokens)}),
    )


def play_pipelined(
    way: Way,
    shape: Shape,
    policy: TimedPolicy,
    *,
    database: Database,
    data_dir: Path,
    broker_url: str,
    stop: threading.Event,
) -> Trained:
    """Through the fleets that run; the trainer's loop is in this thread, and one more waits for the engine.

    The run is held up until the engine serves version 0: what comes before is the same for every way.
    """
    config = run_config(way, shape)
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        run_control.pause(conn, run.name)
        engines.register(conn, way.url, run_id=run.id)
    trainer = Trainer(
        run=run,
        database=database,
        policy=policy,
        weights=WeightStore(data_dir / "weights"),
        checkpoints=CheckpointStore(data_dir / "checkpoints", run.name),
        lock=RunLock(database, run),
        broker_url=broker_url,
    )
    trainer.resume()
    _wait_until_live(database, run.id)
    started = time.monotonic()
    with database.begin() as conn:
        run_control.resume(conn, run.name)
    if not trainer.train(stop):
        raise SetupError(f"{way.name} was stopped before its end")
    seconds = time.monotonic() - started
    sampled_tokens = _sampled_tokens(way)
    with database.begin() as conn:
        engines.remove(conn, way.url)
    return _read(database, run.id, way, seconds=seconds, sampled_tokens=sampled_tokens)


def load_policy(way: Way, shape: Shape) -> TimedPolicy:
    """What the way's trainer trains. Not for several threads at once."""
    policy = TimedPolicy.load(run_config(way, shape))
    policy.step_s = shape.step_s
    return policy


def _wait_until_live(database: Database, run_id: int) -> None:
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    while True:
        with database.begin() as conn:
            if engines.live_version(conn, run_id) is not None:
                return
        if time.monotonic() > deadline:
            raise SetupError(f"run {run_id}: its engine does not serve version 0 after {LIVE_TIMEOUT_S:g} s")
        time.sleep(POLL_EVERY_S)


def _sampled_tokens(way: Way) -> int:
    with urllib.request.urlopen(f"{way.url}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _read(database: Database, run_id: int, way: Way, *, seconds: float, sampled_tokens: int) -> Trained:
    with database.begin() as conn:
        episodes = conn.execute(
            text(
                """
                SELECT s.version_in - e.version_min AS lag, t.num_tokens
                  FROM trained_episode t JOIN train_step s ON s.id = t.step_id JOIN episode e ON e.id = t.episode_id
                 WHERE s.run_id = :run_id AND s.state = 'DONE'
                """
            ),
            {"run_id": run_id},
        ).all()
        dropped = conn.execute(
            text(
                """
                SELECT drop_reason, count(*) AS num FROM episode_group
                 WHERE run_id = :run_id AND state = 'DROPPED' GROUP BY drop_reason
                """
            ),
            {"run_id": run_id},
        ).all()
    return Trained(
        way=way,
        seconds=seconds,
        sampled_tokens=sampled_tokens,
        trained_tokens=sum(row.num_tokens for row in episodes),
        long_episodes=sum(row.num_tokens >= LONG_TOKENS for row in episodes),
        dropped=Counter({row.drop_reason: row.num for row in dropped}),
        lags=Counter(row.lag for row in episodes),
    )
