"""The figures of the live display and of the final report, over a small run that is played by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import JsonValue
from sqlalchemy import Connection, text

from common.config import RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, episodes, groups, report, retries, runs, steps, tasks, turns, versions
from common.db.episodes import Claim, Wakeup
from common.db.examples import EXAMPLES, Answer, ask, run_example
from common.db.session import Database
from common.db.snapshot import EpisodeFailure, take_snapshot
from common.db.steps import TrainedEpisode
from common.episode import (
    EpisodeState,
    FinishReason,
    GroupState,
    Message,
    RunState,
    Sampled,
    Stage,
    Turn,
    VersionSpan,
    episode_digest,
)
from common.errors import SetupError
from common.outcomes import Outcome
from common.weights import Published

START_WEIGHTS = Published(location="/nowhere", manifest_sha256="0" * 64)
CONFIG = RunConfig(
    name="played",
    handler="calculator",
    model=Path("/nowhere"),
    rollout=RolloutConfig(group_size=2),
    train=TrainConfig(groups_per_step=2, num_versions=3, minibatches=1),
)


@dataclass
class PlayedRun:
    """Moves a run's episodes by hand, as the fleets and the trainer would."""

    conn: Connection
    config: RunConfig = CONFIG
    digests: dict[int, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = runs.open_run(self.conn, self.config)
        payloads: list[tuple[str, dict[str, JsonValue]]] = [
            (f"task-{n:02d}", {"question": f"{n} + {n}?"}) for n in range(self.config.num_groups + 2)
        ]
        tasks.load(self.conn, dataset="played", handler="calculator", payloads=payloads)
        self.task_ids = tasks.ids(self.conn, "played")
        versions.publish(self.conn, self.run.id, 0, START_WEIGHTS)
        engines.register(self.conn, f"http://{self.config.name}", run_id=self.run.id)

    def feed(self, *, num_groups: int) -> list[Wakeup]:
        """Make groups; the episodes in order."""
        task_ids, self.task_ids = self.task_ids[:num_groups], self.task_ids[num_groups:]
        return groups.create(self.conn, run_id=self.run.id, task_ids=task_ids, size=self.config.rollout.group_size)

    def claim(self, wakeup: Wakeup) -> Claim:
        claim = episodes.claim(self.conn, wakeup, worker="w", token=uuid4(), lease_s=60, configs={})
        assert claim is not None
        return claim

    def init(self, wakeup: Wakeup) -> Wakeup:
        claim = self.claim(wakeup)
        wakeup_ = episodes.move(self.conn, claim, EpisodeState.READY, why="prepared", prepared={"sandbox": None})
        assert wakeup_ is not None
        return wakeup_

    def turn(self, claim: Claim, *, index: int, version: int) -> None:
        ids = (claim.episode_id, index, version)
        sampled = Sampled(
            ids=ids,
            logprobs=(-0.5,) * len(ids),
            spans=(VersionSpan(version=version, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
        )
        said = (Message(role="assistant", content=f"turn {index}"), Message(role="tool", content="42"))
        turns.save(
            self.conn,
            claim,
            Turn(index=index, suffix_ids=(1, 2), sampled=sampled, messages=said, engine="http://e", latency_ms=5),
        )
        self.digests.setdefault(claim.episode_id, []).append(sampled.digest)

    def run_turns(self, wakeup: Wakeup, *, versions: tuple[int, ...], outcome: Outcome = Outcome.FINISHED) -> Wakeup:
        claim = self.claim(wakeup)
        for index, version in enumerate(versions):
            self.turn(claim, index=index, version=version)
        sampled = episodes.move(self.conn, claim, EpisodeState.SAMPLED, why="played", outcome=outcome)
        assert sampled is not None
        return sampled

    def score(self, wakeup: Wakeup, *, reward: float) -> None:
        episodes.move(
            self.conn,
            self.claim(wakeup),
            EpisodeState.SCORED,
            why="scored",
            reward=reward,
            reward_parts={"right": reward},
        )

    def play(self, wakeup: Wakeup, *, reward: float, versions: tuple[int, ...] = (0, 0)) -> None:
        """An episode's whole way."""
        self.score(self.run_turns(self.init(wakeup), versions=versions), reward=reward)

    def train(
        self, *, version_in: int, lag_max: float = 0.0, gap: float = 1e-6, damaged: tuple[int, ...] = ()
    ) -> list[int]:
        """One training step over what is complete; the ids of the trained episodes."""
        take = steps.take_groups(
            self.conn,
            self.run.id,
            version_in=version_in,
            num_groups=self.config.train.groups_per_step,
            max_staleness=self.config.train.max_staleness,
        )
        assert take.step is not None
        trained = [
            e.episode_id for group in steps.load_groups(self.conn, take.step.id) for e in group.episodes if e.turns
        ]
        steps.finish_step(
            self.conn,
            take.step,
            published=START_WEIGHTS,
            metrics={"logprob_gap_max": gap, "lag_max": lag_max},
            trained=[
                TrainedEpisode(
                    episode_id=episode_id,
                    digest=b"other" if episode_id in damaged else episode_digest(self.digests[episode_id]),
                    advantage=0.0,
                    num_tokens=6,
                )
                for episode_id in trained
            ],
        )
        return trained


@pytest.fixture
def played(database: Database) -> Iterator[PlayedRun]:
    with database.begin() as conn:
        yield PlayedRun(conn)


def test_snapshot_of_a_run_that_has_just_begun(played: PlayedRun) -> None:
    before = take_snapshot(played.conn, played.run.id)
    assert before.state is RunState.ACTIVE
    assert before.version_newest == 0
    assert before.version_live is None
    assert (before.lag_last, before.lag_max, before.tokens_sampled, before.rewards) == (None, None, 0, ())
    assert set(before.episodes.values()) == {0}


def test_snapshot_tells_waiting_from_working_in_each_stage(played: PlayedRun) -> None:
    _new, claimed, ready, sampled, claimed_sampled, scored = played.feed(num_groups=3)
    played.claim(claimed)
    played.init(ready)
    played.run_turns(played.init(sampled), versions=(0,))
    played.claim(played.run_turns(played.init(claimed_sampled), versions=(0,)))
    played.play(scored, reward=0.25)

    now = take_snapshot(played.conn, played.run.id)
    stages = {stage: (c.waiting, c.working, c.done) for stage, c in now.stages.items()}
    assert stages == {Stage.INIT: (1, 1, 4), Stage.RUN: (1, 0, 3), Stage.EVAL: (1, 1, 1)}
    assert now.episodes[EpisodeState.SCORED] == 1
    assert now.groups[GroupState.OPEN] == 3
    assert now.tokens_sampled == 3 + 3 + 6
    assert [(r.version, r.episodes, r.mean_reward) for r in now.rewards] == [(0, 1, 0.25)]


def test_snapshot_counts_only_its_own_run(played: PlayedRun) -> None:
    played.play(played.feed(num_groups=1)[0], reward=1.0)
    other = PlayedRun(played.conn, CONFIG.model_copy(update={"name": "other"}))
    now = take_snapshot(played.conn, other.run.id)
    assert now.tokens_sampled == 0
    assert set(now.episodes.values()) == set(now.groups.values()) == {0}


def test_snapshot_follows_versions_engines_and_staleness(played: PlayedRun) -> None:
    (engine,) = engines.own(played.conn, "keeper", lease_s=60)
    engines.loaded(played.conn, engine.id, owner="keeper", version=1)
    for wakeup in played.feed(num_groups=4):
        played.play(wakeup, reward=1.0, versions=(0, 1))
    played.train(version_in=0, lag_max=1.0)
    played.train(version_in=1, lag_max=0.0)
    now = take_snapshot(played.conn, played.run.id)
    assert (now.version_newest, now.version_live) == (2, 1)
    assert (now.lag_last, now.lag_max) == (0, 1)
    assert (now.groups[GroupState.TRAINED], now.groups[GroupState.OPEN]) == (4, 0)


def test_snapshot_shows_why_episodes_failed_and_what_handlers_raise_but_no_trouble_that_is_over(
    played: PlayedRun,
) -> None:
    over, raised, lost, failed = played.feed(num_groups=2)

    def last_after(wakeup: Wakeup, outcome: Outcome, detail: str, max_attempts: int = 5) -> EpisodeFailure | None:
        claim = played.claim(wakeup)
        retries.retry(played.conn, claim, outcome=outcome, detail=detail, afresh=False, max_attempts=max_attempts)
        return take_snapshot(played.conn, played.run.id).last_failure

    assert last_after(over, Outcome.HANDLER_FAILED, "init of a:B: once") == EpisodeFailure(
        episode_id=over.episode_id, why="handler_failed: init of a:B: once"
    )
    played.play(over, reward=1.0)
    assert take_snapshot(played.conn, played.run.id).last_failure is None
    assert last_after(lost, Outcome.SANDBOX_FAILED, "no room") is None
    assert last_after(raised, Outcome.HANDLER_FAILED, "boom") == EpisodeFailure(
        episode_id=raised.episode_id, why="handler_failed: boom"
    )
    assert last_after(failed, Outcome.ENGINE_LOST, "no engine", max_attempts=1) == EpisodeFailure(
        episode_id=failed.episode_id, why="engine_lost: no engine"
    )


def play_whole_run(played: PlayedRun) -> dict[str, list[int]]:
    """Three versions with one of each mishap; ids of the episodes by what became of them."""
    a, b, c, d = played.feed(num_groups=2)
    for wakeup, reward in ((a, 0.0), (b, 1.0), (c, 0.0), (d, 0.0)):
        played.play(wakeup, reward=reward)
    first = played.train(version_in=0, gap=2e-6)

    # One is tried twice from the start; one fails for good; its sibling and the next group are trained.
    e, f, g, h, i, j = played.feed(num_groups=3)
    again = retries.retry(
        played.conn, played.claim(e), outcome=Outcome.SANDBOX_FAILED, detail="no room", afresh=True, max_attempts=5
    )
    assert again is not None
    played.play(again, reward=1.0, versions=(1,))
    played.play(f, reward=1.0, versions=(1,))
    for wakeup in (g, h):
        retries.retry(
            played.conn, played.claim(wakeup), outcome=Outcome.HANDLER_FAILED, detail="bug", afresh=True, max_attempts=1
        )
    # The second group has no baseline and is dropped; the third makes the step full.
    played.play(i, reward=0.0, versions=(0, 1))
    played.play(j, reward=1.0, versions=(0, 1))
    second = played.train(version_in=1, gap=5e-6)

    # Sampled by version 0, too old for version 2.
    k, m, n, o, p, q = played.feed(num_groups=3)
    for wakeup in (k, m):
        played.play(wakeup, reward=1.0, versions=(0,))
    for wakeup in (n, o, p, q):
        played.play(wakeup, reward=1.0, versions=(2,))
    third = played.train(version_in=2)
    runs.finish(played.conn, played.run.id)
    return {
        "trained": first + second + third,
        "failed": [g.episode_id, h.episode_id],
        "stale": [k.episode_id, m.episode_id],
    }


def test_summary_of_a_whole_run(played: PlayedRun) -> None:
    fates = play_whole_run(played)
    whole = report.summary(played.conn, played.run.id)
    assert whole.state is RunState.FINISHED
    assert whole.versions == (0, 1, 2, 3)
    assert whole.mean_reward_by_version == pytest.approx((4 / 8, 1.0, 1.0))
    assert whole.episodes_total == 16
    assert whole.episodes_trained == len(fates["trained"]) == 12
    assert whole.episodes_failed == len(fates["failed"]) == 2
    assert whole.episodes_stale == len(fates["stale"]) == 2
    assert (whole.episodes_cancelled, whole.episodes_dropped_other, whole.episodes_untrainable) == (0, 0, 0)
    assert (whole.episodes_lost, whole.episodes_in_flight, whole.episodes_trained_twice) == (0, 0, 0)
    assert whole.lag_max == 1
    assert whole.lag_mean == pytest.approx(2 / 12)
    assert whole.token_mismatches == 0
    assert whole.logprob_gap_max == 5e-6
    assert (whole.groups_trained, whole.groups_trained_zero_variance, whole.episodes_left_out) == (6, None, None)
    assert whole.attempts == 17
    assert whole.failures == {"handler_failed": 2, "sandbox_failed": 1}
    assert whole.last_failure == EpisodeFailure(episode_id=fates["failed"][1], why="handler_failed: bug")
    assert whole.outcomes == {"finished": 14, "handler_failed": 2}
    # a..d 2 turns each, e and f 1, i and j 2, the last six 1: 20 turns of 3 tokens.
    assert whole.tokens_sampled == 20 * 3


def test_rewards_of_versions_without_episodes_are_none(played: PlayedRun) -> None:
    for wakeup in played.feed(num_groups=1):
        played.play(wakeup, reward=0.5, versions=(2,))
    assert report.summary(played.conn, played.run.id).mean_reward_by_version == (None, None, 0.5)


def test_unsettled_episodes_are_in_flight_while_the_run_goes_on_and_lost_when_it_is_over(played: PlayedRun) -> None:
    _waiting, scored = played.feed(num_groups=1)
    played.play(scored, reward=1.0)
    going = report.summary(played.conn, played.run.id)
    assert (going.episodes_in_flight, going.episodes_lost) == (2, 0)
    runs.finish(played.conn, played.run.id)
    over = report.summary(played.conn, played.run.id)
    assert (over.episodes_in_flight, over.episodes_lost) == (0, 2)


def test_an_episode_that_its_step_left_out_is_lost(played: PlayedRun) -> None:
    for wakeup in played.feed(num_groups=2):
        played.play(wakeup, reward=1.0)
    left_out, *_ = played.train(version_in=0)
    played.conn.execute(text("DELETE FROM trained_episode WHERE episode_id = :id"), {"id": left_out})
    whole = report.summary(played.conn, played.run.id)
    assert (whole.episodes_trained, whole.episodes_lost) == (3, 1)


def test_an_episode_that_never_sampled_is_untrainable_not_lost(played: PlayedRun) -> None:
    silent, *others = played.feed(num_groups=2)
    played.score(played.run_turns(played.init(silent), versions=(), outcome=Outcome.AGENT_TIMEOUT), reward=0.0)
    for wakeup in others:
        played.play(wakeup, reward=1.0)
    played.train(version_in=0)
    whole = report.summary(played.conn, played.run.id)
    assert (whole.episodes_trained, whole.episodes_untrainable, whole.episodes_lost) == (3, 1, 0)


def test_an_episode_trained_by_a_step_other_than_its_groups_counts_as_trained_twice(played: PlayedRun) -> None:
    for wakeup in played.feed(num_groups=4):
        played.play(wakeup, reward=1.0)
    first, *_ = played.train(version_in=0)
    played.train(version_in=1)
    played.conn.execute(
        text("UPDATE trained_episode SET step_id = (SELECT max(id) FROM train_step) WHERE episode_id = :id"),
        {"id": first},
    )
    assert report.summary(played.conn, played.run.id).episodes_trained_twice == 1


def test_tokens_that_changed_on_their_way_to_the_loss_are_counted(played: PlayedRun) -> None:
    wakeups = played.feed(num_groups=2)
    for wakeup in wakeups:
        played.play(wakeup, reward=1.0)
    played.train(version_in=0, damaged=(wakeups[0].episode_id, wakeups[3].episode_id))
    assert report.summary(played.conn, played.run.id).token_mismatches == 2


def answers(played: PlayedRun) -> dict[str, Answer]:
    return {example.title: run_example(played.conn, example, played.run.name) for example in EXAMPLES}


def test_the_examples_answer_their_questions(played: PlayedRun) -> None:
    play_whole_run(played)
    learns, never, timing, said, stale = answers(played).values()

    assert learns.columns == ("version", "episodes", "mean_reward", "mean_turns", "mean_tokens")
    assert [(row[0], row[1], float(str(row[2]))) for row in learns.rows] == [(0, 8, 0.5), (1, 2, 1.0), (2, 4, 1.0)]

    assert never.rows == (("task-01", 2, 0, "finished"),)

    assert [row[0] for row in timing.rows] == ["INIT", "RUN", "EVAL"]
    assert [row[1] for row in timing.rows] == [14, 14, 14]

    newest = max(wakeup for wakeup in played.digests)
    assert said.columns == ("turn", "agent", "tool", "sampled_ids", "logprobs")
    assert said.rows == ((0, "turn 0", "42", [newest, 0, 2], [-0.5, -0.5, -0.5]),)

    assert [(row[0], row[1], float(str(row[2])), *row[3:]) for row in stale.rows] == [
        (0, 10, 83.3, 0, 2),
        (1, 2, 16.7, 1, 1),
    ]


def test_the_examples_have_no_answer_for_an_unknown_run(played: PlayedRun) -> None:
    assert [run_example(played.conn, example, "nobody").rows for example in EXAMPLES] == [()] * 5


def test_the_pasted_form_of_an_example_gives_the_same_answer(played: PlayedRun) -> None:
    play_whole_run(played)
    for example in EXAMPLES:
        pasted = example.for_run(played.run.name)
        assert ":run" not in pasted
        assert ask(played.conn, pasted) == run_example(played.conn, example, played.run.name)


def test_somebodys_sql_may_only_read(database: Database) -> None:
    with database.begin() as conn:
        assert ask(conn, "SELECT '100 %' AS share, 2 AS n") == Answer(columns=("share", "n"), rows=(("100 %", 2),))
    with pytest.raises(SetupError, match="give one statement that only reads"), database.begin() as conn:
        ask(conn, "DELETE FROM run")


def test_wrong_sql_is_answered_with_the_databases_own_words(database: Database) -> None:
    with pytest.raises(SetupError, match='relation "episodes" does not exist'), database.begin() as conn:
        ask(conn, "SELECT * FROM episodes")
