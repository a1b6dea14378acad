"""Evaluation beside the training: which versions, on which tasks, counted how, and what crashes leave of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from common.config import EvalConfig, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import audit, engines, evaluations, groups, report, run_control, runs, steps, versions
from common.db.episodes import Wakeup
from common.db.evaluations import Evaluation
from common.db.session import Database
from common.episode import RunState
from common.weights import Published
from tests.integration.world import World
from trainer.evaluation import wait_for_evaluations
from workers.feeder import Feeder
from workers.held_out import Patience

PUBLISHED = Published(location="/nowhere", manifest_sha256="0" * 64)


class Scene(World):
    """A run that is evaluated, its feeder, and what it sent."""

    def __init__(self, database: Database, config: RunConfig) -> None:
        with database.begin() as conn:
            run = runs.open_run(conn, config)
            engines.register(conn, "http://engine", run_id=run.id)
        super().__init__(database, run, [])
        self.sent: list[Wakeup] = []
        self.feeder = self.new_feeder()

    def new_feeder(self, *, give_up_after_s: float = 600) -> Feeder:
        return Feeder(self.database, self.sent.extend, patience=Patience(give_up_after_s=give_up_after_s))

    def publish(self, number: int, *, loaded: bool = True) -> None:
        with self.database.begin() as conn:
            versions.publish(conn, self.run.id, number, PUBLISHED)
        if loaded:
            self.load(number)

    def load(self, number: int) -> None:
        self.query("UPDATE engine SET version = :number RETURNING id", number=number)

    def query(self, statement: str, **given: object) -> list[tuple[object, ...]]:
        with self.database.begin() as conn:
            return [tuple(row) for row in conn.execute(text(statement), {"run_id": self.run.id, **given})]

    def round(self) -> list[Wakeup]:
        """Let the feeder look once; the episodes to evaluate that it made."""
        self.sent.clear()
        self.feeder.round()
        evaluating = {
            id for (id,) in self.query("SELECT id FROM episode WHERE run_id = :run_id AND eval_version IS NOT NULL")
        }
        return [wakeup for wakeup in self.sent if wakeup.episode_id in evaluating]

    def wanted(self) -> int | None:
        with self.database.begin() as conn:
            wanted = versions.wanted(conn, self.run.id)
        return None if wanted is None else wanted.number

    def results(self) -> tuple[Evaluation, ...]:
        with self.database.begin() as conn:
            return evaluations.results(conn, self.run.name)

    def fail(self, wakeup: Wakeup) -> None:
        self.query(
            "UPDATE episode SET state = 'FAILED', outcome = 'engine_lost' WHERE id = :id RETURNING id",
            id=wakeup.episode_id,
        )
        self.query(
            "UPDATE episode_group SET num_final = num_final + 1, state = CASE WHEN num_final + 1 = size"
            " THEN 'COMPLETE' ELSE state END WHERE id = (SELECT group_id FROM episode WHERE id = :id) RETURNING id",
            id=wakeup.episode_id,
        )


def make_config(**given: object) -> RunConfig:
    return RunConfig(
        name="run-a",
        model=Path("model"),
        num_tasks=6,
        rollout=RolloutConfig(group_size=2),
        train=TrainConfig(groups_per_step=2, minibatches=1, num_versions=5),
        eval=EvalConfig.model_validate({"every_versions": 2, "num_tasks": 3, **given}),
    )


@pytest.fixture
def scene(database: Database) -> Scene:
    return Scene(database, make_config())


def test_every_nth_version_and_the_last_are_evaluated_and_the_row_comes_with_the_version(scene: Scene):
    for number in range(6):
        scene.publish(number, loaded=False)
        scene.publish(number, loaded=False)
    assert [one.version for one in scene.results()] == [0, 2, 4, 5]
    assert not any(one.finished for one in scene.results())


def test_engines_stay_with_a_version_until_it_is_evaluated_and_then_go_on_to_the_next_one_due(scene: Scene):
    for number in range(4):
        scene.publish(number, loaded=False)
    assert scene.wanted() == 0
    scene.load(0)
    for wakeup in scene.round():
        scene.finish(wakeup)
    assert scene.wanted() == 0
    scene.round()
    assert scene.wanted() == 2  # 3 is the newest, and 2 is due before it.


def test_held_out_tasks_are_their_own_though_their_keys_are_those_of_trained_ones(scene: Scene):
    scene.publish(0)
    scene.round()
    rows = scene.query(
        "SELECT t.key, t.payload ->> 'question', g.eval_version IS NULL FROM episode_group g"
        " JOIN task t ON t.id = g.task_id WHERE g.run_id = :run_id"
    )
    trained = {(key, question) for key, question, trains in rows if trains}
    held_out = {(key, question) for key, question, trains in rows if not trains}
    assert len(held_out) == 3
    assert {key for key, _ in held_out} <= {"0", "1", "2", "3", "4", "5"}
    assert not {question for _, question in trained} & {question for _, question in held_out}


def test_tasks_that_are_trained_on_are_left_out_of_the_held_out_set(database: Database, tmp_path: Path):
    trained, held_out = tmp_path / "trained.jsonl", tmp_path / "held_out.jsonl"
    trained.write_text('{"q": "a"}\n{"q": "b"}\n')
    held_out.write_text('{"q": "b"}\n{"q": "c"}\n')
    config = make_config(dataset=held_out).model_copy(update={"dataset": trained})
    scene = Scene(database, config)
    scene.publish(0)
    scene.round()
    played = "SELECT t.payload ->> 'q' FROM episode_group g JOIN task t ON t.id = g.task_id WHERE eval_version = 0"
    assert scene.query(played) == [("c",)]

    held_out.write_text('{"q": "a"}\n{"q": "b"}\n')
    scene.feeder = scene.new_feeder()
    scene.round()
    assert "none that is not trained on" in str(scene.query("SELECT error FROM run"))
    held_out.write_text('{"q": "d"}\n')
    scene.feeder = scene.new_feeder()
    scene.round()
    assert "are not those that it was evaluated on before" in str(scene.query("SELECT error FROM run"))


def test_evaluation_takes_no_room_of_training_and_is_never_taken_by_it(scene: Scene):
    scene.publish(0)
    evaluating = scene.round()
    assert len(evaluating) == 3
    with scene.database.begin() as conn:
        assert groups.num_in_flight(conn, scene.run.id, live_version=0) == scene.run.config.groups_in_flight
    for wakeup in evaluating:
        scene.finish(wakeup)
    with scene.database.begin() as conn:
        take = steps.take_groups(conn, scene.run.id, version_in=0, num_groups=1, max_staleness=1)
        assert take.step is None
        assert not take.dropped
        assert report.summary(conn, scene.run.id).mean_reward_by_version == (None,) * 5
    assert scene.query("SELECT * FROM reward_by_version") == []


def test_no_more_evaluation_episodes_are_in_flight_than_the_run_allows(database: Database):
    scene = Scene(database, make_config(num_tasks=5, samples_per_task=2, max_episodes_in_flight=4))
    scene.publish(0)
    first = scene.round()
    assert len(first) == 4
    assert scene.round() == []
    for wakeup in first[:2]:
        scene.finish(wakeup)
    assert len(scene.round()) == 2


def test_a_feeder_that_dies_in_the_middle_of_an_evaluation_is_followed_by_one_that_goes_on(database: Database):
    scene = Scene(database, make_config(max_episodes_in_flight=2))
    scene.publish(0)
    for wakeup in scene.round():
        scene.finish(wakeup)
    scene.publish(1, loaded=False)
    scene.feeder = scene.new_feeder()
    for wakeup in scene.round():
        scene.finish(wakeup)
    scene.round()
    (result,) = scene.results()
    assert (result.finished, result.tasks, result.scored, result.under_way) == (True, 3, 3, 0)


def test_figures_of_an_evaluation_by_hand(database: Database):
    scene = Scene(database, make_config(samples_per_task=3))
    scene.publish(0)
    evaluating = scene.round()
    for wakeup, reward in zip(evaluating[:7], (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0), strict=True):
        scene.finish(wakeup, reward=reward)
    scene.finish(evaluating[7], version=1)
    scene.fail(evaluating[8])
    scene.round()
    (result,) = scene.results()
    # Means of the tasks: 1/3, 0 and, of the one episode that counts, 1.
    assert result.mean_reward == pytest.approx(4 / 9)
    assert result.standard_error == pytest.approx((((1 / 9) ** 2 + (4 / 9) ** 2 + (5 / 9) ** 2) / 2 / 3) ** 0.5)
    # pass@1: 1/3, 0, 1. pass@2: 1 - C(2, 2) / C(3, 2) = 2/3 and 0; the third task has one episode. pass@3: 1 and 0.
    assert result.pass_at == pytest.approx((4 / 9, 1 / 3, 1 / 2))
    assert (result.episodes, result.scored, result.failed, result.mixed, result.finished) == (9, 7, 1, 1, True)


def test_an_episode_that_is_scored_without_a_turn_counts(scene: Scene):
    scene.publish(0)
    evaluating = scene.round()
    scene.finish(evaluating[0], reward=1.0)
    scene.finish(evaluating[1], reward=1.0)
    scene.finish(evaluating[2], reward=0.0)
    scene.query(
        "UPDATE episode SET num_turns = 0, version_min = NULL, version_max = NULL WHERE id = :id RETURNING id",
        id=evaluating[2].episode_id,
    )
    (result,) = scene.results()
    assert result.mean_reward == pytest.approx(2 / 3)
    assert result.pass_at == pytest.approx((2 / 3,))


def test_a_mean_of_zero_is_a_figure(scene: Scene):
    scene.publish(0)
    for wakeup in scene.round():
        scene.finish(wakeup, reward=0.0)
    scene.round()
    (result,) = scene.results()
    assert (result.mean_reward, result.standard_error, result.pass_at) == (0.0, 0.0, (0.0,))


def test_a_version_that_no_engine_gets_is_given_up_so_that_the_engines_go_on(scene: Scene):
    scene.feeder = scene.new_feeder(give_up_after_s=0)
    scene.publish(0, loaded=False)
    scene.publish(1, loaded=False)
    for _ in range(2):
        assert scene.round() == []
    (result,) = scene.results()
    assert result.error == "no engine served version 0 for 0 s"
    assert scene.wanted() == 1


def test_the_run_is_not_over_before_its_last_version_is_evaluated(scene: Scene):
    scene.publish(5)
    stop = threading.Event()
    over: list[bool] = []

    def wait() -> None:
        over.append(wait_for_evaluations(scene.database, scene.run, stop=stop, look_up=lambda: None))

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        evaluating = scene.round()
        for wakeup in evaluating[1:]:
            scene.finish(wakeup)
        scene.round()
        assert waiting.is_alive()
        scene.finish(evaluating[0])
        scene.round()
        waiting.join(10)
        assert over == [True]
    finally:
        stop.set()
        waiting.join(10)


def test_a_trainer_that_is_told_to_stop_does_not_wait_for_the_evaluation(scene: Scene):
    scene.publish(5)
    stop = threading.Event()
    stop.set()
    assert not wait_for_evaluations(scene.database, scene.run, stop=stop, look_up=lambda: None)


def test_stopping_the_run_ends_its_evaluations_and_leaves_nothing_open(scene: Scene):
    scene.publish(0)
    evaluating = scene.round()
    scene.finish(evaluating[0])
    with scene.database.begin() as conn:
        run_control.stop(conn, scene.run.name, why="enough")
        assert audit.violations(conn, scene.run.id) == dict.fromkeys(audit.CHECKS, 0)
        assert runs.require(conn, scene.run.name).state is RunState.STOPPED
    (result,) = scene.results()
    assert (result.error, result.scored, result.cancelled, result.finished) == ("run_stopped", 1, 2, True)
    assert wait_for_evaluations(scene.database, scene.run, stop=threading.Event(), look_up=lambda: None)


def test_evaluation_episodes_are_played_with_their_own_sampling_on_their_own_version(database: Database):
    scene = Scene(database, make_config(temperature=0.0, max_tokens_per_turn=7))
    scene.publish(0)
    evaluating = scene.round()
    training = next(wakeup for wakeup in scene.sent if wakeup not in evaluating)
    claim, other = scene.must_claim(evaluating[0]), scene.must_claim(training)
    assert (claim.eval_version, claim.rollout.temperature, claim.rollout.max_tokens_per_turn) == (0, 0.0, 7)
    assert (other.eval_version, other.rollout) == (None, scene.run.config.rollout)


def test_files_of_a_version_are_kept_until_it_is_evaluated(scene: Scene):
    scene.publish(0, loaded=False)
    with scene.database.begin() as conn:
        assert versions.needed(conn, scene.run.id) == {0}
        evaluations.close(conn, scene.run.id, 0)
        assert versions.needed(conn, scene.run.id) == frozenset()


def test_rows_to_train_by_sql_are_never_those_of_held_out_tasks(scene: Scene):
    scene.publish(0)
    held_out = scene.round()
    trained = [wakeup for wakeup in scene.sent if wakeup not in held_out]
    for wakeup in (held_out[0], trained[0]):
        scene.finish(wakeup)
    assert scene.query("SELECT DISTINCT episode_id FROM samples") == [(trained[0].episode_id,)]
    assert scene.query("SELECT episode_id, eval_version FROM turns ORDER BY eval_version") == [
        (held_out[0].episode_id, 0),
        (trained[0].episode_id, None),
    ]
