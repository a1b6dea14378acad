"""The audit finds nothing in an orderly run, and each kind of damage under its own name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from common.db import audit, retries, steps
from common.db.steps import TrainedEpisode
from common.episode import Stage, episode_digest
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn


@pytest.fixture
def trained(world: World) -> World:
    """A run with one trained step of two groups, all of whose episodes are final."""
    for number, wakeup in enumerate(world.feed(2)):
        world.finish(wakeup, reward=float(number % 2))
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step
        assert step is not None
        digest = episode_digest([make_turn(0).sampled.digest])
        ids = [episode.episode_id for group in steps.load_groups(conn, step.id) for episode in group.episodes]
        steps.finish_step(
            conn,
            step,
            published=Published(location=str(world.run.config.model), manifest_sha256="0" * 64),
            metrics={},
            trained=[TrainedEpisode(episode_id=id_, digest=digest, advantage=0.0, num_tokens=3) for id_ in ids],
        )
    return world


def found_in(world: World) -> dict[str, int]:
    with world.database.begin() as conn:
        return {name: count for name, count in audit.violations(conn, world.run.id).items() if count}


def damage(world: World, statement: str) -> None:
    with world.database.begin() as conn:
        conn.execute(text(statement))


def test_an_orderly_run_has_no_violations(trained: World) -> None:
    assert found_in(trained) == {}


@pytest.mark.parametrize(
    ("statement", "name", "count"),
    [
        ("UPDATE episode_group SET num_final = 1 WHERE id = 1", "groups_miscounted", 1),
        ("UPDATE episode_group SET state = 'COMPLETE' WHERE id = 1", "groups_unsettled", 1),
        ("UPDATE episode_group SET state = 'DROPPED', step_id = NULL WHERE id = 1", "doubled", 2),
        ("UPDATE episode_group SET state = 'DROPPED' WHERE id = 1", "dropped_fresh", 1),
        ("DELETE FROM trained_episode WHERE episode_id = 1", "left_out", 1),
        ("UPDATE train_step SET version_in = 2", "trained_stale", 4),
        ("UPDATE episode SET version_min = -2 WHERE id = 1", "trained_stale", 1),
        ("UPDATE turn SET index = 1 WHERE episode_id = 1", "turn_gaps", 1),
        ("UPDATE turn SET sample = 1 WHERE episode_id = 1", "sample_gaps", 1),
        ("UPDATE turn_tokens SET sampled_ids = logprobs WHERE turn_id = 1", "turns_damaged", 1),
        ("UPDATE trained_episode SET digest = 'x' WHERE episode_id = 1", "token_mismatches", 1),
        ("INSERT INTO sandbox (episode_id, attempt, backend, node, handle) VALUES (1, 1, 'b', 'n', 'h')",
         "sandboxes_left", 1),
        ("UPDATE episode SET outcome = 'lease_lost' WHERE id = 1", "infra_rewards", 1),
        ("DELETE FROM episode_event WHERE episode_id = 1 AND to_state = 'SAMPLED'", "broken_histories", 1),
        ("DELETE FROM episode_event WHERE episode_id = 1 AND to_state = 'SCORED'", "broken_histories", 1),
    ],
)  # fmt: skip
def test_damage_is_found_under_its_name(trained: World, statement: str, name: str, count: int) -> None:
    damage(trained, statement)
    assert found_in(trained)[name] == count


def test_an_episode_that_is_not_final_is_lost(trained: World) -> None:
    trained.feed()
    assert found_in(trained) == {"lost": 2, "groups_miscounted": 1, "groups_unsettled": 1}


def test_resumption_is_measured_from_the_kill(world: World) -> None:
    wakeup = world.prepare(world.feed()[0])
    claim = world.claim(wakeup, worker="run@here:7", lease_s=-1)
    assert claim is not None
    kill = audit.Kill(worker="run@here:7", at=datetime.now(UTC) - timedelta(seconds=10))
    with world.database.begin() as conn:
        (again,) = retries.reap(conn, max_attempts=5)
    with world.database.begin() as conn:
        (waiting,) = audit.resumptions(conn, world.run.id, [kill])
    world.sample(again)
    with world.database.begin() as conn:
        (resumed,) = audit.resumptions(conn, world.run.id, [kill])
        other = audit.resumptions(conn, world.run.id, [audit.Kill(worker="run@here:8", at=kill.at)])

    assert again.stage is Stage.RUN
    assert waiting.resumed_s is None
    assert 10 <= waiting.taken_back_s < 15
    assert resumed.resumed_s is not None
    assert waiting.taken_back_s <= resumed.resumed_s < 20
    assert other == []


def test_a_failed_episode_counts_as_no_resumption(world: World) -> None:
    claim = world.claim(world.feed()[0], worker="init@here:7")
    assert claim is not None
    with world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.LEASE_LOST, detail="died", afresh=False, max_attempts=1)
    kill = audit.Kill(worker="init@here:7", at=datetime.now(UTC) - timedelta(seconds=10))
    with world.database.begin() as conn:
        assert audit.resumptions(conn, world.run.id, [kill]) == []
