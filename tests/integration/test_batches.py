"""Groups for a trainer of one's own: the ids that were sampled, in the shapes of others, each trained once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text

from common.db import report, retries, turns
from common.db.episodes import Wakeup
from common.db.run_lock import RunLock
from common.db.session import Database
from common.errors import SetupError
from common.outcomes import Outcome
from common.weights import WeightStore
from tests.integration.world import World, make_turn, make_world
from trainer.batches import GroupSource, trl_batch, verl_batch

NO_BROKER = "amqp://guest:guest@127.0.0.1:1//"
"""Nothing listens there: announcements fail, which the trainer bears."""


def fails(world: World, wakeup: Wakeup) -> None:
    claim = world.must_claim(world.prepare(wakeup))
    with world.database.begin() as conn:
        retries.retry(conn, claim, outcome=Outcome.HANDLER_FAILED, detail="boom", afresh=False, max_attempts=1)


def rewrites_its_history(world: World, wakeup: Wakeup) -> None:
    claim = world.must_claim(world.prepare(wakeup))
    with world.database.begin() as conn:
        turns.save(conn, claim, make_turn(0))
    with world.database.begin() as conn:
        sampled = turns.save_last(conn, claim, replace(make_turn(1), sample=1), outcome=Outcome.FINISHED)
    world.score(sampled)


def write_version(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.fixture
def open_source(world: World, tmp_path: Path) -> Iterator[Callable[[], GroupSource]]:
    """A source as a new process would open it, when that of the one before is gone."""
    with ExitStack() as gone:

        def make() -> GroupSource:
            gone.close()
            lock = gone.enter_context(closing(RunLock(world.database, world.run)))
            weights = WeightStore(tmp_path / "weights")
            return GroupSource(run=world.run, database=world.database, weights=weights, lock=lock, broker_url=NO_BROKER)

        yield make


def play(world: World, *, version: int = 0) -> list[int]:
    """Two groups of two episodes with rewards 0, 1, 0, 1; the ids of the episodes."""
    wakeups = world.feed(2)
    for number, wakeup in enumerate(wakeups):
        world.finish(wakeup, version=version, reward=float(number % 2))
    return [wakeup.episode_id for wakeup in wakeups]


def test_rows_are_what_was_sampled_in_the_shapes_of_others(
    world: World, open_source: Callable[[], GroupSource]
) -> None:
    source = open_source()
    assert source.start(write_version) == 0
    episode_ids = play(world)
    taken = source.take(0)
    assert taken is not None
    assert (taken.version, taken.metrics["reward_mean"]) == (0, 0.5)

    trl = trl_batch(taken.rows)
    assert trl.prompt_ids == [[1, 2, 3]] * 4
    assert trl.completion_ids == [[5, 6, 7]] * 4
    assert trl.tool_mask == [[1, 1, 1]] * 4
    assert trl.logprobs == [[-0.25, -0.5, -0.75]] * 4
    assert (trl.rewards, trl.episode_ids) == ([0.0, 1.0, 0.0, 1.0], episode_ids)
    assert trl.advantages == pytest.approx([-1, 1, -1, 1], abs=1e-3)
    assert trl.group_ids[0] == trl.group_ids[1] != trl.group_ids[2] == trl.group_ids[3]

    verl = verl_batch(taken.rows, pad_id=0)
    assert verl.input_ids.tolist() == [[1, 2, 3, 5, 6, 7]] * 4
    assert verl.token_level_scores[:, -1].tolist() == trl.rewards
    assert verl.uid.tolist() == [str(group_id) for group_id in trl.group_ids]
    assert source.finish(taken, write_version, metrics={"loss": 0.25})
    with world.database.begin() as conn:
        step = conn.execute(text("SELECT state, metrics ->> 'loss' AS loss FROM train_step")).one()
        assert tuple(step) == ("DONE", "0.25")
        assert report.summary(conn, world.run.id).token_mismatches == 0


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"reward": 0.5, "loss": float("nan")}, "metrics: loss = nan is not a finite number"),
        ({"loss": "low"}, "metrics: loss = 'low' is not a finite number"),
        ({"lo\0ss": 0.5}, "metrics: the string 'lo.x00ss' contains the character"),
    ],
    ids=["nan", "text", "name"],
)
def test_metrics_that_cannot_be_kept_are_refused_before_anything_is_published(
    world: World, open_source: Callable[[], GroupSource], metrics: dict[str, float], expected: str
) -> None:
    source = open_source()
    source.start(write_version)
    play(world)
    taken = source.take(0)
    assert taken is not None
    with pytest.raises(ValueError, match=expected):
        source.finish(taken, lambda folder: pytest.fail("published"), metrics=metrics)
    # Numbers of numpy are numbers.
    assert source.finish(taken, write_version, metrics={"loss": np.float32(0.25), "num_updates": 3})
    with world.database.begin() as conn:
        assert conn.execute(text("SELECT metrics ->> 'loss' FROM train_step")).scalar_one() == "0.25"


def test_groups_that_teach_nothing_are_warned_of(
    world: World, open_source: Callable[[], GroupSource], caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source()
    source.start(write_version)
    play(world)
    assert source.take(0) is not None
    assert "nothing to learn" not in caplog.text
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET reward = 0.5"))
    assert source.take(0) is not None
    assert "no episode of a step has an advantage, so there is nothing to learn" in caplog.text
    assert "groups=2 zero_variance=2 episodes=4" in caplog.text


def test_a_step_that_was_not_finished_comes_again_whole_and_a_finished_one_never(
    world: World, open_source: Callable[[], GroupSource]
) -> None:
    source = open_source()
    source.start(write_version)
    episode_ids = play(world)
    first = source.take(0)
    assert first is not None
    # The process dies here. Another finds the same groups, in the same order.
    second_source = open_source()
    assert second_source.start(write_version) == 0
    again = second_source.take(0)
    assert again is not None
    assert again.work.step == first.work.step
    assert [row.sample.episode_id for row in again.rows] == episode_ids
    assert second_source.finish(again, write_version)
    # The first was not dead after all: its step is the other's, which has ended.
    second_source.lock.close()
    with pytest.raises(SetupError, match="another trainer has finished it"):
        source.finish(first, write_version)
    source.lock.close()
    assert open_source().start(write_version) == 1
    with world.database.begin() as conn:
        trained = conn.execute(text("SELECT episode_id FROM trained_episode ORDER BY 1")).scalars().all()
        assert trained == episode_ids
    play(world, version=1)
    later = second_source.take(1)
    assert later is not None
    assert not {row.sample.episode_id for row in later.rows} & set(episode_ids)


def test_the_end_of_the_run_is_the_end_of_the_groups(world: World, open_source: Callable[[], GroupSource]) -> None:
    source = open_source()
    assert source.take(world.run.config.train.num_versions) is None
    with world.database.begin() as conn:
        assert conn.execute(text("SELECT state FROM run")).scalar_one() == "FINISHED"
    source.stop.set()
    assert source.take(0) is None


@pytest.mark.parametrize("spoil", [fails, rewrites_its_history])
def test_a_trainer_of_even_groups_is_given_no_others(
    database: Database, tmp_path: Path, spoil: Callable[[World, Wakeup], None]
) -> None:
    world = make_world(database, group_size=3)
    wakeups = world.feed(3)
    spoil(world, wakeups[0])
    for number, wakeup in enumerate(wakeups[1:]):
        world.finish(wakeup, reward=float(number % 2))
    weights = WeightStore(tmp_path / "weights")
    lock = RunLock(database, world.run)
    source = GroupSource(run=world.run, database=database, weights=weights, lock=lock, broker_url=NO_BROKER, even=True)
    source.start(write_version)
    taken = source.take(0)
    assert taken is not None
    assert [row.sample.episode_id for row in taken.rows] == [wakeup.episode_id for wakeup in wakeups[3:]]
    with database.begin() as conn:
        fates = conn.execute(text("SELECT state, drop_reason FROM episode_group ORDER BY id")).all()
        assert [tuple(fate) for fate in fates] == [("DROPPED", "uneven"), ("TAKEN", None), ("TAKEN", None)]
        assert report.summary(conn, world.run.id).episodes_dropped_other == (3 if spoil is not fails else 2)


def test_even_groups_cannot_spare_rows_that_are_left_out(world: World, open_source: Callable[[], GroupSource]) -> None:
    train = world.run.config.train.model_copy(update={"truncated": "mask"})
    run = replace(world.run, stored=world.run.config.model_copy(update={"train": train}))
    with pytest.raises(SetupError, match="even ones cannot spare"):
        replace(open_source(), run=run, even=True).take(0)
