"""Plays groups of a run as engines would, with the log-probs of the published weights; for tests of the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from sqlalchemy import text

from common.db import episodes, turns, versions
from common.db.session import Database
from common.db.versions import PolicyVersion
from common.episode import EpisodeState, FinishReason, Sampled, ScoredEpisode, Turn, TurnTokens, VersionSpan
from common.outcomes import Outcome
from tests.integration.world import World
from trainer.policy import Policy
from trainer.samples import make_samples, pad
from trainer.tiny import VOCAB_SIZE

NO_BROKER = "amqp://guest:guest@127.0.0.1:1//"
"""Nothing listens there: announcements fail, which the trainer bears."""


def newest(world: World) -> PolicyVersion | None:
    with world.database.begin() as conn:
        return versions.newest(conn, world.run.id)


def wait_for_version(world: World, number: int) -> PolicyVersion:
    deadline = time.monotonic() + 60
    while (version := newest(world)) is None or version.number < number:
        assert time.monotonic() < deadline, f"version {number} did not come, newest is {version}"
        time.sleep(0.02)
    return version


def play(
    world: World,
    version: PolicyVersion,
    *,
    num_groups: int = 2,
    outcomes: Sequence[Outcome] = (Outcome.FINISHED,),
    rewards: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Groups of two episodes with these rewards, sampled by the published weights as an engine would.

    They end with the `outcomes`, in turn.
    """
    policy = Policy.load(world.run.config.model_copy(update={"model": version.path}))
    for number, wakeup in enumerate(world.feed(num_groups)):
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            for turn in sampled_turns(policy, seed=wakeup.episode_id, version=version.number):
                turns.save(conn, claim, turn)
            moved = episodes.move(
                conn, claim, EpisodeState.SAMPLED, why="played", outcome=outcomes[number % len(outcomes)]
            )
        assert moved is not None
        world.score(moved, reward=rewards[number % 2])


def sampled_turns(policy: Policy, *, seed: int, version: int) -> list[Turn]:
    """Two turns of random ids with the log-probs that `policy` gives them."""
    rng = np.random.default_rng(seed)
    suffixes, sampled = (rng.integers(0, VOCAB_SIZE, size=(2, 6), dtype=np.int32) for _ in range(2))
    blank = [
        TurnTokens(suffix_ids=a, sampled_ids=b, logprobs=np.zeros(6, np.float32), versions=np.zeros(6, np.int32))
        for a, b in zip(suffixes, sampled, strict=True)
    ]
    (row,) = make_samples(ScoredEpisode(episode_id=seed, group_id=0, outcome="finished", reward=0, turns=tuple(blank)))
    with torch.no_grad():
        logprobs = policy.logprobs(pad([row]))[0].numpy()[row.mask_L].reshape(2, 6)
    return [
        Turn(
            index=index,
            suffix_ids=tuple(suffixes[index].tolist()),
            sampled=Sampled(
                ids=tuple(sampled[index].tolist()),
                logprobs=tuple(logprobs[index].tolist()),
                spans=(VersionSpan(version=version, start=0, end=6),),
                finish_reason=FinishReason.STOP,
            ),
            messages=(),
            engine="http://engine",
            latency_ms=1,
        )
        for index in range(2)
    ]


@contextmanager
def database_away(database: Database, server_url: str) -> Iterator[None]:
    """Nobody can talk to the database inside the block."""
    name = database.engine.url.database
    server = Database.connect(server_url, pool_size=1)
    try:
        with server.begin() as conn:
            conn.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        with server.begin() as conn:
            conn.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :n"), {"n": name})
        yield
        with server.begin() as conn:
            conn.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    finally:
        server.dispose()
