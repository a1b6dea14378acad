"""Several runs share one fleet: shares by weight, limits of their own, and an operator who changes both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import RolloutConfig, RunConfig, SharingConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, run_control, runs, sandboxes, sharing
from common.db.episodes import Wakeup
from common.db.runs import Run
from common.db.session import Database
from common.episode import EpisodeState, Stage
from common.errors import SetupError
from tests.integration.world import World, unheard
from workers.feeder import Feeder

CAPACITY = 24


def config_of(name: str, given: SharingConfig | None = None, *, oversample: int = 0) -> RunConfig:
    return RunConfig(
        name=name,
        model=Path("model"),
        num_tasks=40,
        rollout=RolloutConfig(group_size=2, oversample=oversample),
        train=TrainConfig(groups_per_step=10, minibatches=1),
        sharing=given or SharingConfig(),
    )


def open_run(database: Database, name: str, **given: float) -> Run:
    """A run with room for 20 groups of 2, and an engine that serves."""
    with database.begin() as conn:
        run = runs.open_run(conn, config_of(name, SharingConfig.model_validate(given)))
        engines.register(conn, f"http://{name}", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0 WHERE run_id = :id"), {"id": run.id})
    return run


def in_flight(database: Database) -> dict[str, int]:
    with database.begin() as conn:
        return {load.run.name: load.episodes for load in sharing.loads(conn)}


def finish(database: Database, run: Run, num: int) -> None:
    """The oldest `num` episodes of the run end."""
    with database.begin() as conn:
        ids = conn.execute(
            text("SELECT id FROM episode WHERE run_id = :id AND state = 'NEW' ORDER BY id LIMIT :num"),
            {"id": run.id, "num": num},
        ).scalars()
        wakeups = [Wakeup(stage=Stage.INIT, episode_id=id, attempt=1) for id in ids]
    world = World(database, run, [])
    for wakeup in wakeups:
        world.finish(wakeup)


@pytest.fixture
def feeder(database: Database) -> Feeder:
    return Feeder(database, unheard, max_episodes_in_flight=CAPACITY)


def test_runs_share_the_fleet_by_weight(database: Database, feeder: Feeder):
    open_run(database, "one", weight=1)
    open_run(database, "two", weight=2)
    open_run(database, "background", weight=0)
    feeder.round()
    assert in_flight(database) == {"one": 8, "two": 16, "background": 0}
    assert feeder.round() == 0


def test_what_a_run_cannot_use_goes_to_the_others(database: Database, feeder: Feeder):
    open_run(database, "small", weight=9, max_episodes_in_flight=5)
    open_run(database, "large")
    feeder.round()
    assert in_flight(database) == {"small": 4, "large": 20}


def test_the_background_gets_what_the_others_leave(database: Database, feeder: Feeder):
    open_run(database, "limited", max_episodes_in_flight=6)
    open_run(database, "background", weight=0)
    feeder.round()
    assert in_flight(database) == {"limited": 6, "background": 18}


def test_a_run_that_joins_gets_its_share_as_the_others_episodes_finish(database: Database, feeder: Feeder):
    first = open_run(database, "first")
    feeder.round()
    open_run(database, "second")
    assert feeder.round() == 0
    for gone in (4, 8):
        finish(database, first, 4)
        feeder.round()
        assert in_flight(database) == {"first": CAPACITY - gone, "second": gone}
    finish(database, first, 10)
    feeder.round()
    assert in_flight(database) == {"first": 12, "second": 12}


def test_a_paused_runs_episodes_count_until_they_end(database: Database, feeder: Feeder):
    paused = open_run(database, "paused")
    feeder.round()
    with database.begin() as conn:
        run_control.pause(conn, "paused")
    open_run(database, "active")
    finish(database, paused, 20)
    feeder.round()
    assert in_flight(database) == {"paused": 4, "active": 20}


def test_a_run_that_cannot_be_fed_leaves_its_share_to_the_others(database: Database, feeder: Feeder):
    open_run(database, "healthy")
    with database.begin() as conn:
        broken = config_of("broken").model_copy(update={"handler": "nothing"})
        run = runs.open_run(conn, broken)
        engines.register(conn, "http://broken", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0"))
    feeder.round()
    assert in_flight(database) == {"healthy": CAPACITY, "broken": 0}


def test_every_run_may_have_a_group_however_small_the_capacity(database: Database):
    for name in ("a", "b", "c"):
        open_run(database, name)
    Feeder(database, unheard, max_episodes_in_flight=3).round()
    assert in_flight(database) == {"a": 2, "b": 2, "c": 2}


def test_sandboxes_in_flight_are_those_that_stand_and_those_that_new_episodes_will_make(database: Database):
    run = open_run(database, "run", max_sandboxes=4)
    feeder = Feeder(database, unheard)
    assert (feeder.round(), feeder.round()) == (2, 0)
    world = World(database, run, [])
    claim = world.must_claim(Wakeup(stage=Stage.INIT, episode_id=1, attempt=1))
    with database.begin() as conn:
        sandboxes.record(conn, claim, backend="folder", node="here", handle="box")
        # Its sandbox is noted already, and counts once.
        assert sharing.require(conn, "run").sandboxes == 4
        episodes.move(conn, claim, EpisodeState.READY, why="prepared", prepared={"sandbox": "box"})
        assert sharing.require(conn, "run").sandboxes == 4
    world.sample(Wakeup(stage=Stage.RUN, episode_id=1, attempt=1))
    finish(database, run, 1)
    assert feeder.round() == 0
    with database.begin() as conn:
        assert sharing.require(conn, "run").sandboxes == 3
        sandboxes.destroyed(conn, [1])
    assert feeder.round() == 1


def test_another_section_of_the_configuration_is_taken_and_the_same_one_leaves_the_operators_values(
    database: Database, feeder: Feeder
):
    run = open_run(database, "run", weight=2)
    feeder.round()
    with database.begin() as conn:
        sharing.change(conn, sharing.require(conn, "run"), SharingConfig(weight=5, max_sandboxes=6))
    open_run(database, "run", weight=2)
    with database.begin() as conn:
        assert sharing.require(conn, "run").sharing == SharingConfig(weight=5, max_sandboxes=6)
    assert open_run(database, "run", weight=3).id == run.id
    with database.begin() as conn:
        assert sharing.require(conn, "run").sharing == SharingConfig(weight=3)


def test_extra_episodes_belong_to_the_group_and_count(database: Database):
    with database.begin() as conn:
        run = runs.open_run(conn, config_of("run", SharingConfig(max_episodes_in_flight=7), oversample=1))
        engines.register(conn, "http://run", run_id=run.id)
        conn.execute(text("UPDATE engine SET version = 0"))
    sent: list[Wakeup] = []
    assert Feeder(database, sent.extend).round() == 2
    assert len(sent) == 6
    with database.begin() as conn:
        made = conn.execute(text("SELECT size, wanted FROM episode_group")).all()
    assert Counter(map(tuple, made)) == {(3, 2): 2}


def test_a_limit_below_a_group_is_refused_and_nothing_changed(database: Database):
    open_run(database, "run")
    with database.begin() as conn, pytest.raises(SetupError, match=r"run run: sharing.max_sandboxes = 1 is less than"):
        sharing.change(conn, sharing.require(conn, "run"), SharingConfig(max_sandboxes=1))
    with pytest.raises(ValueError, match=r"max_episodes_in_flight = 2 is less than the 3 episodes of a group"):
        config_of("run", SharingConfig(max_episodes_in_flight=2), oversample=1)


def test_the_command_shows_and_changes_shares(database: Database, database_url: str, feeder: Feeder):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}

    def rollmill(*arguments: str, capacity: str = "24") -> tuple[int, str]:
        given = {"ROLLMILL_MAX_EPISODES_IN_FLIGHT": capacity} if capacity else {}
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "run", "share", *arguments],
            env={**environment, "ROLLMILL_DATABASE_URL": database_url, **given},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    open_run(database, "one")
    open_run(database, "two")
    feeder.round()
    assert rollmill("one", "--weight", "3", "--max-episodes", "20") == (
        0,
        "run one has weight 3, max episodes 20, max sandboxes none\n",
    )
    assert rollmill("one", "--max-episodes", "none")[1].endswith("max episodes none, max sandboxes none\n")
    table = [line.split() for line in rollmill()[1].splitlines()[1:]]
    assert table == [
        ["one", "active", "3", "none", "none", "12", "18"],
        ["two", "active", "1", "none", "none", "12", "6"],
    ]
    unset = rollmill(capacity="")[1].splitlines()
    assert [line.split()[-1] for line in unset[1:3]] == ["-", "-"]
    assert unset[3:] == ["no shares: ROLLMILL_MAX_EPISODES_IN_FLIGHT is not set here; set it as it is for the feeder"]
    refused = {
        ("one", "--max-episodes", "99999999999"): "max_episodes_in_flight = 99999999999: Input should be less than or",
        ("one", "--weight", "1e308"): "run one: weight = 1e+308: Input should be less than or equal to 1000000",
        ("one", "--max-sandboxes", "1"): "sharing.max_sandboxes = 1 is less than the 2 episodes of a group",
        ("one", "--max-sandboxes", "some"): "--max-sandboxes some: give a number, or none for no limit",
        ("one", "--weight", "-1"): "run one: weight = -1.0: Input should be greater than or equal to 0",
        ("one", "--weight", "nan"): "run one: weight = nan: Input should be a finite number",
        ("nobody", "--weight", "1"): "no run nobody in the database",
        ("nobody",): "no run nobody in the database",
        ("--weight", "1"): "say which run's share to change",
    }
    for arguments, expected in refused.items():
        code, said = rollmill(*arguments)
        assert (code, expected in said) == (2, True), said
    with database.begin() as conn:
        run_control.stop(conn, "two", why="enough")
    assert "run two is stopped: it has no share any more" in rollmill("two", "--weight", "1")[1]
