"""The page of worked queries: each block of SQL on it runs, answers, and is the one that the program has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import text

from common.db import retries, steps, versions
from common.db.episodes import Wakeup
from common.db.examples import EXAMPLES, MORE_EXAMPLES, ask
from common.db.steps import TrainedEpisode
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World

ALL = (*EXAMPLES, *MORE_EXAMPLES)
PUBLISHED = Published(location="/weights/1", manifest_sha256="0" * 64)


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "queries.md").read_text()


@pytest.fixture
def lived(world: World) -> World:
    """A run in which something of everything has happened: a step, a retry, mixed rewards, a task that fails."""
    first, second, third, fourth = world.feed(2)
    claim = world.must_claim(first)
    with world.database.begin() as conn:
        again = retries.retry(
            conn, claim, outcome=Outcome.SANDBOX_FAILED, detail="no room", afresh=True, max_attempts=5
        )
    assert again is not None
    for wakeup, reward in ((again, 0.0), (second, 1.0), (third, 0.0), (fourth, 0.0)):
        world.finish(wakeup, reward=reward)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=2, max_staleness=1).step
        assert step is not None
        versions.publish(conn, world.run.id, 0, PUBLISHED)
        trained = [
            TrainedEpisode(episode_id=wakeup.episode_id, digest=b"d", advantage=0.5, num_tokens=3)
            for wakeup in (first, second, third, fourth)
        ]
        metrics = {"loss": 0.25, "reward_mean": 0.25, "num_tokens": 12.0}
        steps.finish_step(conn, step, published=PUBLISHED, metrics=metrics, trained=trained)
    return world


def test_the_page_holds_exactly_the_programs_queries(page: str) -> None:
    found = re.search(r"the answers of `([^`]+)`", page)
    assert found is not None
    assert re.findall(r"```sql\n(.*?)\n```", page, re.DOTALL) == [example.for_run(found[1]) for example in ALL]
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [example.title for example in ALL]
    assert "No rows" not in page


def test_every_query_of_the_page_answers(page: str, lived: World) -> None:
    with lived.database.begin() as conn:
        conn.execute(text("UPDATE run SET name = :name"), {"name": re.findall(r"the answers of `([^`]+)`", page)[0]})
    for statement in re.findall(r"```sql\n(.*?)\n```", page, re.DOTALL):
        with lived.database.begin() as conn:
            assert ask(conn, statement).rows, statement


def answer(world: World, title: str) -> tuple[tuple[object, ...], ...]:
    (example,) = (example for example in ALL if title in example.title)
    with world.database.begin() as conn:
        return ask(conn, example.for_run(world.run.name)).rows


def test_failures_are_named_by_their_own_kind_not_by_what_became_of_the_episode(lived: World) -> None:
    assert answer(lived, "What broke") == (("INIT", "sandbox_failed", 1, 1, 0, 1, "sandbox_failed: no room"),)


def test_each_kind_of_failure_names_the_episode_of_its_last_error(world: World) -> None:
    for wakeup, detail in zip(world.feed(), ("first", "second"), strict=True):
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            retries.retry(conn, claim, outcome=Outcome.SANDBOX_FAILED, detail=detail, afresh=True, max_attempts=5)
    with world.database.begin() as conn:
        found = ask(conn, "SELECT last_episode_id, last_error FROM failures_by_kind").rows
    assert found == ((claim.episode_id, "sandbox_failed: second"),)


def test_failures_are_counted_each_and_by_episode(world: World) -> None:
    first, second, other, _ = world.feed(2)
    # Two siblings: one fails three times, for good; the other once. And one of another group.
    for wakeup, num_failures in ((first, 3), (second, 1), (other, 1)):
        again: Wakeup | None = wakeup
        for _ in range(num_failures):
            assert again is not None
            claim = world.must_claim(again)
            with world.database.begin() as conn:
                again = retries.retry(
                    conn, claim, outcome=Outcome.SANDBOX_FAILED, detail="no room", afresh=True, max_attempts=3
                )
    assert answer(world, "What broke") == (
        ("INIT", "sandbox_failed", 5, 3, 1, other.episode_id, "sandbox_failed: no room"),
    )


def test_a_run_that_goes_on_counts_as_no_failure(world: World) -> None:
    claim = world.must_claim(world.feed()[0])
    with world.database.begin() as conn:
        retries.release(conn, [claim.token], why="the worker is shutting down")
    assert answer(world, "What broke") == ()


def test_throughput_counts_what_each_stage_finished(lived: World) -> None:
    rows = answer(lived, "how many episodes did each stage")
    assert [sum(int(str(row[column])) for row in rows) for column in (1, 2, 3)] == [4, 4, 4]


def test_the_group_with_mixed_rewards_is_found(lived: World) -> None:
    assert [row[2] for row in answer(lived, "mixed rewards")] == [0.0, 1.0]


def test_the_longest_history_is_that_of_the_retried_episode(lived: World) -> None:
    states = [(row[2], row[3]) for row in answer(lived, "longest history")]
    assert states == [(None, "NEW"), ("NEW", "NEW"), ("NEW", "READY"), ("READY", "SAMPLED"), ("SAMPLED", "SCORED")]
