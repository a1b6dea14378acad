"""`rollmill cancel` and `rollmill run`: exit codes and words, on a real database."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import text

from tests.integration.conftest import Answer
from tests.integration.world import World


def states(world: World) -> list[str]:
    with world.database.begin() as conn:
        return list(conn.execute(text("SELECT state FROM episode ORDER BY id")).scalars())


def test_cancel_says_what_it_did_and_what_had_ended_before(world: World, rollmill: Callable[..., Answer]):
    first, second, *_ = world.feed(2)
    world.must_claim(first)
    one = str(first.episode_id)
    assert rollmill("cancel", "--episode", one, "--why", "the tool was down") == (
        0,
        "1 episode cancelled, work on 1 of them stops within seconds\n",
    )
    assert rollmill("cancel", "--episode", one) == (1, "nothing to cancel: all had ended before (1 cancelled)\n")
    assert rollmill("cancel", "--group", "1") == (0, "1 episode cancelled; 1 had ended before (1 cancelled)\n")
    assert rollmill("cancel", "--run", "run-a") == (0, "2 episodes cancelled; 2 had ended before (2 cancelled)\n")
    assert states(world) == ["CANCELLED"] * 4
    with world.database.begin() as conn:
        details = conn.execute(text("SELECT detail FROM episode WHERE id <= 2 ORDER BY id")).scalars().all()
    assert details == ["the tool was down", "cancelled by hand"]
    assert second.episode_id == 2


def test_what_is_not_there_is_named_with_exit_code_2_and_nothing_is_cancelled(
    world: World, rollmill: Callable[..., Answer]
):
    world.feed()
    assert rollmill("cancel", "--episode", "1", "--episode", "77") == (
        2,
        "rollmill: no episode 77 in the database; nothing was cancelled\n",
    )
    for command in (("cancel", "--run", "nobody"), ("run", "stop", "nobody")):
        assert rollmill(*command) == (2, "rollmill: no run nobody in the database; there are: run-a\n")
    assert states(world) == ["NEW", "NEW"]


def test_a_run_is_paused_resumed_and_stopped(world: World, rollmill: Callable[..., Answer]):
    world.feed(2)
    assert rollmill("run", "pause", "run-a")[0] == 0
    assert rollmill("run", "pause", "run-a") == (
        2,
        "rollmill: run run-a is paused: only one that is active can become paused\n",
    )
    assert rollmill("run", "resume", "run-a") == (0, "run run-a is active again\n")
    assert rollmill("run", "stop", "run-a", "--why", "no use") == (
        0,
        "run run-a is stopped: 4 episodes cancelled; 2 groups dropped\n",
    )
    listed = rollmill("run", "list")
    assert listed[1].splitlines()[1].split() == [
        "run-a",
        "stopped",
        "-",
        "of",
        "4",
        "-",
        "-",
        "4",
        "of",
        "4",
        "0",
        "4",
        "2",
        "run_stopped",
    ]
    assert rollmill("run", "stop", "run-a") == (
        2,
        "rollmill: run run-a is stopped: only one that is active or paused can become stopped\n",
    )
