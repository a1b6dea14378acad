"""Any interleaving of claims, failures, late and doubled messages keeps the invariants, and nothing gets stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy
from sqlalchemy import Connection, text

from common.config import RolloutConfig
from common.db import groups, runs
from common.db.episodes import Claim, Wakeup
from common.db.retries import AT_ONCE
from common.episode import FINAL_STATES, MOVES, EpisodeState, GroupState, Stage
from common.outcomes import AGENT_OUTCOMES, Outcome
from tests.integration.lockstep import LATER, MAX_ATTEMPTS, Lockstep
from tests.integration.world import World

INFRASTRUCTURE = sorted(set(Outcome) - AGENT_OUTCOMES)
DEEDS = (
    *("deliver", "deliver", "deliver", "move_on", "move_on", "move_on", "save_turn", "save_turn"),
    *("feed", "deliver_late", "deliver_wrong", "lose_all_messages", "renew", "retry", "retry", "release"),
    *("cancel_episode", "cancel_group", "cancel_run", "come_due", "resend_due"),
    *("fail_again", "fail_again", "deliver_delayed", "deliver_delayed"),
    *("expire", "expire", "reap", "resend", "go_all_the_way", "go_all_the_way", "train", "train"),
)
Draw = Callable[[SearchStrategy[Any]], Any]
Item = TypeVar("Item")


class EpisodeMachine(RuleBasedStateMachine):
    """Draws what happens next. Messages that were delivered and claims that are gone may come again any time.

    One rule draws the deed, because of several rules hypothesis would leave most out of each example: enough for a
    bug of two deeds, too few to bring an episode through its stages.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.both = Lockstep(world)
        self.messages = self.both.feed(1)
        self.claims: list[Claim] = []

    @rule(deed=st.sampled_from(DEEDS), data=st.data())
    def something_happens(self, deed: str, data: st.DataObject) -> None:
        getattr(self, deed)(data.draw)

    def feed(self, draw: Draw) -> None:
        if list(self.both.groups.values()).count(GroupState.OPEN) < 2:
            self.messages += self.both.feed(1)

    def deliver(self, draw: Draw) -> None:
        if message := self._one_of(draw, [message for message in self.messages if self._waits_for(message)]):
            self._deliver(message)

    def deliver_late(self, draw: Draw) -> None:
        if message := self._one_of(draw, self.messages):
            self._deliver(message)

    def deliver_wrong(self, draw: Draw) -> None:
        if message := self._one_of(draw, self.messages):
            stage, later = draw(st.sampled_from(Stage)), draw(st.integers(-1, 1))
            self._deliver(replace(message, stage=stage, attempt=message.attempt + later))

    def lose_all_messages(self, draw: Draw) -> None:
        self.messages.clear()

    def renew(self, draw: Draw) -> None:
        self.both.renew(self._some_claims(draw))

    def save_turn(self, draw: Draw) -> None:
        off, lag, num_ids = draw(st.sampled_from([0, 0, 0, -1, 1])), draw(st.integers(0, 2)), draw(st.integers(1, 4))
        if (claim := self._claim(draw)) and claim.stage is Stage.RUN:
            index = max(len(self.both.episodes[claim.episode_id].turns) + off, 0)
            self.both.save_turn(claim, index=index, version=max(self.both.version - lag, 0), num_ids=num_ids)

    def move_on(self, draw: Draw) -> None:
        if claim := self._claim(draw):
            outcome = draw(st.sampled_from(sorted(AGENT_OUTCOMES)))
            self.messages += self.both.move_on(claim, sandbox=draw(st.booleans()), outcome=outcome)

    def retry(self, draw: Draw) -> None:
        if claim := self._claim(draw):
            outcome, backoff = draw(st.sampled_from(INFRASTRUCTURE)), draw(st.sampled_from([AT_ONCE, LATER]))
            self.messages += self.both.retry(claim, outcome, backoff)

    def fail_again(self, draw: Draw) -> None:
        """An episode fails twice in a row, after which it has to wait."""
        message = self._one_of(draw, [message for message in self.messages if self._waits_for(message)])
        for backoff in (AT_ONCE, LATER):
            if message and (claim := self.both.deliver(message)):
                self.claims.append(claim)
                again = self.both.retry(claim, Outcome.ENGINE_LOST, backoff)
                self.messages += again
                message = next(iter(again), None)

    def release(self, draw: Draw) -> None:
        self.messages += self.both.release(self._some_claims(draw))

    def expire(self, draw: Draw) -> None:
        if claim := self._claim(draw):
            self.both.expire(claim)

    def reap(self, draw: Draw) -> None:
        self.messages += self.both.reap(draw(st.sampled_from([AT_ONCE, LATER])))

    def come_due(self, draw: Draw) -> None:
        self.both.come_due()

    def resend_due(self, draw: Draw) -> None:
        self.messages += self.both.resend(only_due=True)

    def deliver_delayed(self, draw: Draw) -> None:
        """A message of before the failure, or of another sender, comes for an episode that has to wait."""
        waiting = [id for id, episode in self.both.episodes.items() if episode.delayed or episode.due]
        if (id := self._one_of(draw, waiting)) and (message := self.both.episodes[id].wakeup(id)):
            self._deliver(message)

    def cancel_episode(self, draw: Draw) -> None:
        if (id := self._one_of(draw, sorted(self.both.episodes))) is not None:
            self.both.cancel_episode(id)

    def cancel_group(self, draw: Draw) -> None:
        if (id := self._one_of(draw, sorted(self.both.groups))) is not None and draw(st.integers(0, 1)):
            self.both.cancel_group(id)

    def cancel_run(self, draw: Draw) -> None:
        if not draw(st.integers(0, 3)):
            self.both.cancel_run()

    def resend(self, draw: Draw) -> None:
        self.messages += self.both.resend()

    def go_all_the_way(self, draw: Draw) -> None:
        """Healthy workers take an episode from where a message finds it to its end."""
        if message := self._one_of(draw, self.messages):
            self._work_off([message])

    def train(self, draw: Draw) -> None:
        if self.both.step is not None:
            self.both.finish_step()
        elif GroupState.COMPLETE in self.both.groups.values():
            self.both.take()
        elif self.both.done:
            self.both.finish_again()

    def _one_of(self, draw: Draw, items: Sequence[Item]) -> Item | None:
        return draw(st.sampled_from(items)) if items else None

    def _waits_for(self, message: Wakeup) -> bool:
        episode = self.both.episodes.get(message.episode_id)
        return episode is not None and episode.token is None and episode.wakeup(message.episode_id) == message

    def _claim(self, draw: Draw) -> Claim | None:
        """Mostly one that holds, at times that of a late worker."""
        held = list(filter(self.both.holds, self.claims))
        return self._one_of(draw, held if held and draw(st.integers(0, 4)) else self.claims)

    def _some_claims(self, draw: Draw) -> list[Claim]:
        return list(filter(None, [self._claim(draw) for _ in range(draw(st.integers(1, 3)))]))

    def _deliver(self, message: Wakeup) -> None:
        if claim := self.both.deliver(message):
            self.claims.append(claim)

    def _work_off(self, wakeups: list[Wakeup]) -> None:
        while wakeups:
            claim = self.both.deliver(wakeups.pop())
            if claim is not None:
                if claim.stage is Stage.RUN:
                    index = len(self.both.episodes[claim.episode_id].turns)
                    self.both.save_turn(claim, index=index, version=self.both.version)
                wakeups += self.both.move_on(claim)

    def teardown(self) -> None:
        """When all workers have died and healthy ones come, the reaper's messages alone bring everything to its end."""
        with self.both.database.begin() as conn:
            conn.execute(text("UPDATE episode SET lease_until = now() - interval '1 s' WHERE claim_token IS NOT NULL"))
        for episode in self.both.episodes.values():
            episode.expired = episode.token is not None
        self.both.reap()
        self.both.come_due()
        self._work_off(self.both.resend())
        if self.both.step is not None:
            self.both.finish_step()
        self.both.take()
        while self.both.step is not None:
            self.both.finish_step()
            self.both.take()
        self.the_database_keeps_its_promises()
        assert {episode.state for episode in self.both.episodes.values()} <= FINAL_STATES
        assert set(self.both.groups.values()) <= {GroupState.TRAINED, GroupState.DROPPED}

    @invariant()
    def the_database_keeps_its_promises(self) -> None:
        with self.both.database.begin() as conn:
            tables = Tables(conn, self.both)
            for check in CHECKS:
                check(tables)


class Tables:
    """All rows as they stand in one transaction, beside the model."""

    def __init__(self, conn: Connection, both: Lockstep) -> None:
        self.conn = conn
        self.both = both
        self.episodes = self.rows("SELECT * FROM episode")

    def rows(self, sql: str) -> list[Any]:
        return list(self.conn.execute(text(sql)))


def rows_and_model_agree(tables: Tables) -> None:
    assert {row.id for row in tables.episodes} == set(tables.both.episodes)
    for row in tables.episodes:
        model = tables.both.episodes[row.id]
        waits = row.not_before is not None
        assert waits == (model.delayed or model.due)
        stored = (row.state, row.attempt, row.failures, row.claim_token, row.outcome, row.reward)
        assert stored == (
            model.state,
            model.attempt,
            model.failures,
            model.token,
            model.outcome,
            model.reward,
        )
    states = {row.id: row.state for row in tables.rows("SELECT id, state FROM episode_group")}
    assert states == tables.both.groups


def every_episode_is_final_or_claimed_or_waits_for_a_message(tables: Tables) -> None:
    for row in tables.episodes:
        final = row.state in FINAL_STATES
        assert (row.claim_token is None) == (row.claim_worker is None) == (row.lease_until is None)
        assert not (final and row.claim_token)
        assert row.not_before is None or not (final or row.claim_token)
        assert final == (row.finished_at is not None)
        assert final or row.enqueued_at is not None
        assert (row.reward is not None) == (row.state == EpisodeState.SCORED)
        assert row.failures <= MAX_ATTEMPTS
        assert (row.failures == MAX_ATTEMPTS) == (row.state == EpisodeState.FAILED)
        if row.state == EpisodeState.FAILED:
            assert row.outcome in INFRASTRUCTURE
            assert row.detail


def turns_are_stored_once_and_counted(tables: Tables) -> None:
    stored: dict[tuple[int, int], list[Any]] = {}
    for turn in tables.rows("SELECT * FROM turn ORDER BY episode_id, attempt, index"):
        stored.setdefault((turn.episode_id, turn.attempt), []).append(turn)
    expected = {(id, n): kept for id, model in tables.both.episodes.items() for n, kept in model.sampled.items()}
    assert {
        key: [(turn.num_sampled, turn.version_spans[0]["version"]) for turn in kept] for key, kept in stored.items()
    } == expected
    assert all([turn.index for turn in kept] == list(range(len(kept))) for kept in stored.values())
    for row in tables.episodes:
        kept = expected.get((row.id, row.attempt), [])
        assert (row.num_turns, row.num_sampled) == (len(kept), sum(num for num, _ in kept))
        seen = [version for _, version in kept]
        assert (row.version_min, row.version_max) == (min(seen, default=None), max(seen, default=None))


def events_are_an_unbroken_chain_of_moves(tables: Tables) -> None:
    chains: dict[int, list[Any]] = {}
    for event in tables.rows("SELECT * FROM episode_event ORDER BY id"):
        chains.setdefault(event.episode_id, []).append(event)
    assert {id: [(e.from_state, e.to_state) for e in chain] for id, chain in chains.items()} == {
        id: model.moves for id, model in tables.both.episodes.items()
    }
    for chain in chains.values():
        for before, after in pairwise(chain):
            assert after.from_state == before.to_state
            assert after.attempt - before.attempt == (after.to_state == EpisodeState.NEW)
            again = after.to_state == after.from_state
            assert again or EpisodeState(after.to_state) in MOVES[EpisodeState(after.from_state)]


def groups_count_their_final_episodes(tables: Tables) -> None:
    rows = tables.rows(
        "SELECT g.*, (SELECT count(*) FROM episode e WHERE e.group_id = g.id AND finished_at IS NOT NULL) AS num"
        "  FROM episode_group g"
    )
    for row in rows:
        assert row.num_final == row.num
        assert (row.num == row.size) == (row.state != GroupState.OPEN) == (row.completed_at is not None)
        assert (row.state in (GroupState.TAKEN, GroupState.TRAINED)) == (row.step_id is not None)


def no_episode_is_trained_twice(tables: Tables) -> None:
    trained = tables.rows("SELECT episode_id, step_id FROM trained_episode")
    assert dict(map(tuple, trained)) == tables.both.trained
    assert len(trained) == len(tables.both.trained)
    published = tables.rows("SELECT number FROM policy_version ORDER BY number")
    assert [row.number for row in published] == list(range(tables.both.version + 1))


def the_feeder_counts_right(tables: Tables) -> None:
    states = Counter(tables.both.groups.values())
    in_flight = states[GroupState.OPEN] + states[GroupState.COMPLETE] + states[GroupState.TAKEN]
    run_id = tables.both.world.run.id
    assert groups.num_not_dropped(tables.conn, run_id) == in_flight + states[GroupState.TRAINED]
    for live in range(tables.both.version + 1):
        not_live = sum(step.version_in >= live for step in tables.both.done)
        assert groups.num_in_flight(tables.conn, run_id, live_version=live) == in_flight + not_live


CHECKS = (
    rows_and_model_agree,
    every_episode_is_final_or_claimed_or_waits_for_a_message,
    turns_are_stored_once_and_counted,
    events_are_an_unbroken_chain_of_moves,
    groups_count_their_final_episodes,
    no_episode_is_trained_twice,
    the_feeder_counts_right,
)


@pytest.mark.parametrize("oversample", [0, 1])
def test_any_interleaving_keeps_the_invariants(world: World, oversample: int) -> None:
    rollout = RolloutConfig(group_size=2, oversample=oversample)
    with world.database.begin() as conn:
        world.run = runs.open_run(conn, world.run.config.model_copy(update={"rollout": rollout}))

    class Machine(EpisodeMachine):
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
