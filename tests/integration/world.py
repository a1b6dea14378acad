"""A run with tasks, and short ways to move its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import JsonValue

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, groups, runs, tasks, turns
from common.db.episodes import Claim, Wakeup
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState, FinishReason, Message, Sampled, Turn, VersionSpan
from common.outcomes import Outcome


@dataclass
class World:
    """A run with tasks, and short ways to move its episodes."""

    database: Database
    run: Run
    task_ids: list[int]

    def feed(self, num_groups: int = 1) -> list[Wakeup]:
        with self.database.begin() as conn:
            return groups.create(
                conn,
                run_id=self.run.id,
                task_ids=self.task_ids[:num_groups],
                size=self.run.config.episodes_per_group,
                wanted=self.run.config.wanted,
            )

    def claim(self, wakeup: Wakeup, *, lease_s: float = 30, worker: str = "w") -> Claim | None:
        with self.database.begin() as conn:
            return episodes.claim(conn, wakeup, worker=worker, token=uuid4(), lease_s=lease_s, configs={})

    def must_claim(self, wakeup: Wakeup, *, lease_s: float = 30) -> Claim:
        claim = self.claim(wakeup, lease_s=lease_s)
        assert claim is not None
        return claim

    def prepare(self, wakeup: Wakeup, *, sandbox: str | None = None) -> Wakeup:
        claim = self.must_claim(wakeup)
        prepared: dict[str, JsonValue] = {"messages": [], "tools": [], "sandbox": sandbox}
        with self.database.begin() as conn:
            moved = episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared=prepared)
        assert moved is not None
        return moved

    def sample(self, wakeup: Wakeup, *, version: int = 0) -> Wakeup:
        claim = self.must_claim(wakeup)
        with self.database.begin() as conn:
            return turns.save_last(conn, claim, make_turn(0, version=version), outcome=Outcome.FINISHED)

    def score(self, wakeup: Wakeup, reward: float = 1.0) -> None:
        claim = self.must_claim(wakeup)
        with self.database.begin() as conn:
            episodes.move(conn, claim, EpisodeState.SCORED, why="scored", reward=reward, reward_parts={})

    def finish(self, wakeup: Wakeup, *, version: int = 0, reward: float = 1.0) -> None:
        self.score(self.sample(self.prepare(wakeup), version=version), reward)


def make_world(database: Database, *, group_size: int = 2) -> World:
    """A new run with six tasks and an engine."""
    config = RunConfig(
        name="run-a",
        model=Path("model"),
        rollout=RolloutConfig(group_size=group_size),
        train=TrainConfig(groups_per_step=2, minibatches=1, num_versions=4),
    )
    with database.begin() as conn:
        run = runs.open_run(conn, config)
        payloads: list[tuple[str, dict[str, JsonValue]]] = [(str(i), {"number": i}) for i in range(6)]
        tasks.load(conn, dataset=config.dataset_name, handler="calculator", payloads=payloads)
        engines.register(conn, "http://engine", run_id=run.id)
        return World(database, run, tasks.ids(conn, config.dataset_name))


def unheard(wakeups: Sequence[Wakeup]) -> None:
    """Sends messages to nobody."""


def make_turn(index: int, *, version: int = 0, ids: tuple[int, ...] = (5, 6, 7)) -> Turn:
    return Turn(
        index=index,
        suffix_ids=(1, 2, 3),
        sampled=Sampled(
            ids=ids,
            logprobs=tuple(-0.25 * (i + 1) for i in range(len(ids))),
            spans=(VersionSpan(version=version, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
        ),
        messages=(Message(role="assistant", content="said"),),
        engine="http://engine",
        latency_ms=7,
    )
