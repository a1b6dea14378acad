"""The episode state machine and a simple model of it in memory: each operation is done on both and must agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from common.db import cancel, episodes, retries, steps, turns, versions
from common.db.cancel import Cancelled
from common.db.episodes import Claim, Wakeup
from common.db.retries import AT_ONCE, Backoff
from common.db.steps import Step, TrainedEpisode
from common.episode import FINAL_STATES, STAGE_OF, EpisodeState, GroupState, Stage
from common.errors import LeaseLost, SetupError
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn

MAX_ATTEMPTS = 3
LATER = Backoff(first_s=3600, max_s=3600)
"""A wait that ends only when the test says so."""
MAX_STALENESS = 1
PUBLISHED = Published(location="weights", manifest_sha256="0" * 64)


@dataclass
class ModelEpisode:
    """What the row of an episode must say."""

    group_id: int
    state: EpisodeState = EpisodeState.NEW
    attempt: int = 1
    failures: int = 0
    token: UUID | None = None
    expired: bool = False
    """Its lease ran out and nobody has reaped it yet."""
    delayed: bool = False
    """It failed twice or more, and its wait is not over."""
    due: bool = False
    """Its wait is over, and nobody has announced or claimed it yet."""
    sandbox: bool = False
    outcome: Outcome | None = None
    reward: float | None = None
    sampled: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """(tokens, version) of each turn, by attempt."""
    moves: list[tuple[EpisodeState | None, EpisodeState]] = field(default_factory=lambda: [(None, EpisodeState.NEW)])

    @property
    def turns(self) -> list[tuple[int, int]]:
        return self.sampled.get(self.attempt, [])

    def wakeup(self, episode_id: int) -> Wakeup | None:
        """The message that this episode waits for; None in a final state."""
        stage = STAGE_OF.get(self.state)
        return Wakeup(stage=stage, episode_id=episode_id, attempt=self.attempt) if stage else None

    def move(self, to: EpisodeState) -> None:
        self.moves.append((self.state, to))
        self.state, self.token, self.expired = to, None, False
        self.delayed = self.due = False

    def give_back(self, *, afresh: bool, outcome: Outcome, backoff: Backoff) -> None:
        self.failures += 1
        self._go_round(afresh=afresh, outcome=outcome)
        self.delayed = backoff is LATER and self.failures > 1 and self.state not in FINAL_STATES

    def _go_round(self, *, afresh: bool, outcome: Outcome) -> None:
        if self.failures >= MAX_ATTEMPTS:
            self.outcome = outcome
            self.move(EpisodeState.FAILED)
        elif afresh:
            self.start_over()
        else:
            self.move(self.state)

    def start_over(self) -> None:
        self.attempt += 1
        self.sandbox = False
        self.move(EpisodeState.NEW)

    @property
    def needs_sandbox(self) -> bool:
        return self.state is EpisodeState.NEW or (self.state is EpisodeState.READY and self.sandbox)


class Lockstep:
    """Both sides. Every method does one operation, asserts that both agree, and returns the messages to send."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.database = world.database
        self.episodes: dict[int, ModelEpisode] = {}
        self.groups: dict[int, GroupState] = {}
        self.step: Step | None = None
        self.done: list[Step] = []
        self.trained: dict[int, int] = {}
        """Step of each episode that went into a loss."""
        with self.database.begin() as conn:
            conn.execute(text("TRUNCATE episode_group, policy_version, train_step RESTART IDENTITY CASCADE"))
            versions.publish(conn, world.run.id, 0, PUBLISHED)

    @property
    def version(self) -> int:
        return len(self.done)

    def feed(self, num_groups: int) -> list[Wakeup]:
        wakeups = self.world.feed(num_groups)
        with self.database.begin() as conn:
            rows = conn.execute(
                text("SELECT id, group_id FROM episode WHERE id = ANY(:ids)"),
                {"ids": [wakeup.episode_id for wakeup in wakeups]},
            ).all()
        for row in rows:
            self.episodes[row.id] = ModelEpisode(group_id=row.group_id)
            self.groups[row.group_id] = GroupState.OPEN
        assert len(rows) == len(wakeups) == self.world.run.config.episodes_per_group * num_groups
        assert wakeups == [self.episodes[wakeup.episode_id].wakeup(wakeup.episode_id) for wakeup in wakeups]
        return wakeups

    def deliver(self, wakeup: Wakeup) -> Claim | None:
        claim = self.world.claim(wakeup)
        episode = self.episodes[wakeup.episode_id]
        free = episode.token is None and episode.wakeup(wakeup.episode_id) == wakeup and not episode.delayed
        assert (claim is not None) == free
        if claim is not None:
            assert (claim.prepared is None) == (claim.stage is Stage.INIT)
            assert claim.outcome == episode.outcome
            episode.token = claim.token
            episode.due = False
        return claim

    def holds(self, claim: Claim) -> bool:
        return self.episodes[claim.episode_id].token == claim.token

    def renew(self, claims: list[Claim]) -> None:
        with self.database.begin() as conn:
            renewed = episodes.renew(conn, [claim.token for claim in claims], lease_s=30)
        assert renewed == {claim.token for claim in claims if self.holds(claim)}
        for claim in filter(self.holds, claims):
            self.episodes[claim.episode_id].expired = False

    def expire(self, claim: Claim) -> None:
        """Let its lease run out, if it still has one."""
        with self.database.begin() as conn:
            conn.execute(
                text("UPDATE episode SET lease_until = now() - interval '1 second' WHERE claim_token = :token"),
                {"token": claim.token},
            )
        if self.holds(claim):
            self.episodes[claim.episode_id].expired = True

    def save_turn(self, claim: Claim, *, index: int, version: int, num_ids: int = 2) -> None:
        episode = self.episodes[claim.episode_id]
        turn = make_turn(index, version=version, ids=tuple(range(num_ids)))
        if not self.holds(claim) or index != len(episode.turns):
            with pytest.raises(LeaseLost), self.database.begin() as conn:
                turns.save(conn, claim, turn)
            return
        with self.database.begin() as conn:
            turns.save(conn, claim, turn)
        episode.sampled.setdefault(episode.attempt, []).append((num_ids, version))

    def move_on(self, claim: Claim, *, sandbox: bool = False, outcome: Outcome = Outcome.FINISHED) -> list[Wakeup]:
        """What a stage does when its work is done."""
        ends: dict[Stage, tuple[EpisodeState, dict[str, Any]]] = {
            Stage.INIT: (EpisodeState.READY, {"prepared": {"sandbox": "box" if sandbox else None}}),
            Stage.RUN: (EpisodeState.SAMPLED, {"outcome": outcome}),
            Stage.EVAL: (EpisodeState.SCORED, {"reward": 0.5, "reward_parts": {"right": 0.5}}),
        }
        to, result = ends[claim.stage]
        if not self.holds(claim):
            with pytest.raises(LeaseLost), self.database.begin() as conn:
                episodes.move(conn, claim, to, why="done", **result)
            return []
        with self.database.begin() as conn:
            wakeup = episodes.move(conn, claim, to, why="done", **result)
        episode = self.episodes[claim.episode_id]
        episode.move(to)
        if claim.stage is Stage.INIT:
            episode.sandbox = sandbox
        elif claim.stage is Stage.RUN:
            episode.outcome = outcome
        else:
            episode.reward = 0.5
            self._leave_stragglers(episode.group_id)
        return self._announced([wakeup] if wakeup else [], [claim.episode_id])

    def retry(self, claim: Claim, outcome: Outcome, backoff: Backoff = AT_ONCE) -> list[Wakeup]:
        """What a stage does after a failure of infrastructure."""
        episode = self.episodes[claim.episode_id]
        afresh = claim.stage is Stage.INIT or (claim.stage is Stage.RUN and episode.sandbox)
        fail = partial(
            retries.retry,
            outcome=outcome,
            detail="broken",
            afresh=afresh,
            max_attempts=MAX_ATTEMPTS,
            backoff=backoff,
        )
        if not self.holds(claim):
            with pytest.raises(LeaseLost), self.database.begin() as conn:
                fail(conn, claim)
            return []
        with self.database.begin() as conn:
            wakeup = fail(conn, claim)
        episode.give_back(afresh=afresh, outcome=outcome, backoff=backoff)
        return self._announced([wakeup] if wakeup else [], [claim.episode_id])

    def release(self, claims: list[Claim]) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = retries.release(conn, [claim.token for claim in claims], why="shutting down")
        held = {claim.episode_id for claim in claims if self.holds(claim)}
        for episode in (self.episodes[id] for id in held):
            if episode.needs_sandbox:
                episode.start_over()
            else:
                episode.move(episode.state)
        return self._announced(wakeups, held)

    def reap(self, backoff: Backoff = AT_ONCE) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = retries.reap(conn, max_attempts=MAX_ATTEMPTS, backoff=backoff)
        expired = [id for id, episode in self.episodes.items() if episode.expired]
        for episode in (self.episodes[id] for id in expired):
            episode.give_back(afresh=episode.needs_sandbox, outcome=Outcome.LEASE_LOST, backoff=backoff)
        return self._announced(wakeups, expired)

    def resend(self, *, only_due: bool = False) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = episodes.resend(conn, after_s=3600 if only_due else 0)
        waiting = [id for id, episode in self.episodes.items() if episode.token is None]
        announced = [id for id in waiting if self.episodes[id].due or not only_due]
        for id in announced:
            self.episodes[id].due = False
        return self._announced(wakeups, announced)

    def come_due(self) -> None:
        """Let the time pass for which failed episodes wait."""
        with self.database.begin() as conn:
            conn.execute(text("UPDATE episode SET not_before = now() - interval '1 s' WHERE not_before > now()"))
        for episode in self.episodes.values():
            episode.due |= episode.delayed
            episode.delayed = False

    def cancel_episode(self, id: int) -> None:
        with self.database.begin() as conn:
            cancelled = cancel.cancel_episodes(conn, [id], why="enough")
        self._cancelled(cancelled, [self.episodes[id]])

    def cancel_group(self, id: int) -> None:
        with self.database.begin() as conn:
            cancelled = cancel.cancel_groups(conn, [id], why="enough")
        self._cancelled(cancelled, self.members(id))

    def cancel_run(self) -> None:
        with self.database.begin() as conn:
            cancelled = cancel.cancel_run(conn, self.world.run.id, why="enough")
        self._cancelled(cancelled, list(self.episodes.values()))

    def _cancelled(self, answer: Cancelled, chosen: list[ModelEpisode]) -> None:
        """The answer must say what happened; those that had ended stay as they are."""
        standing = [episode for episode in chosen if episode.state not in FINAL_STATES]
        ended = Counter(episode.state for episode in chosen if episode.state in FINAL_STATES)
        num_at_work = sum(episode.token is not None for episode in standing)
        assert answer == Cancelled(num_cancelled=len(standing), num_at_work=num_at_work, already_final=ended)
        for episode in standing:
            episode.move(EpisodeState.CANCELLED)
        self._complete_groups()

    def take(self) -> None:
        """Take the oldest fresh group into a step, and drop the others that can't be trained."""
        complete = sorted(id for id, state in self.groups.items() if state is GroupState.COMPLETE)
        with self.database.begin() as conn:
            take = steps.take_groups(
                conn, self.world.run.id, version_in=self.version, num_groups=1, max_staleness=MAX_STALENESS
            )
        dropped = {id for id in complete if not self._trainable(id)}
        assert take.dropped.total() == len(dropped)
        for id in dropped:
            self.groups[id] = GroupState.DROPPED
        fresh = [id for id in complete if id not in dropped]
        assert (take.step is not None) == bool(fresh)
        if fresh:
            self.groups[fresh[0]] = GroupState.TAKEN
            self.step = take.step

    def _trainable(self, group_id: int) -> bool:
        siblings = self.members(group_id)
        oldest = min((version for e in siblings for _, version in e.turns), default=self.version)
        scored = [e for e in siblings if e.state is EpisodeState.SCORED and e.outcome and e.outcome.is_agent]
        return len(scored) >= 2 and oldest >= self.version - MAX_STALENESS

    def finish_step(self) -> None:
        """Train the open step's groups and publish its version."""
        assert self.step is not None
        with self.database.begin() as conn:
            loaded = steps.load_groups(conn, self.step.id)
        trained = [episode.episode_id for group in loaded for episode in group.episodes]
        self._finish(self.step, trained)
        self.trained |= dict.fromkeys(trained, self.step.id)
        self.groups |= {id: GroupState.TRAINED for id, state in self.groups.items() if state is GroupState.TAKEN}
        self.done.append(self.step)
        self.step = None

    def finish_again(self) -> None:
        """A trainer that comes late with a step that is done."""
        with pytest.raises(SetupError, match="is not open"):
            self._finish(self.done[-1], [])

    def _finish(self, step: Step, trained: list[int]) -> None:
        accounts = [TrainedEpisode(episode_id=id, digest=b"", advantage=0.0, num_tokens=1) for id in trained]
        with self.database.begin() as conn:
            steps.finish_step(conn, step, published=PUBLISHED, metrics={}, trained=accounts)

    def _leave_stragglers(self, group_id: int) -> None:
        wanted, siblings = self.world.run.config.wanted, self.members(group_id)
        if wanted is not None and sum(sibling.state is EpisodeState.SCORED for sibling in siblings) >= wanted:
            for sibling in siblings:
                if sibling.state not in FINAL_STATES:
                    sibling.move(EpisodeState.CANCELLED)

    def members(self, group_id: int) -> list[ModelEpisode]:
        return [episode for episode in self.episodes.values() if episode.group_id == group_id]

    def _announced(self, wakeups: list[Wakeup], episode_ids: list[int] | set[int]) -> list[Wakeup]:
        """The messages must be those of these episodes as they now stand, each once; groups may be complete now."""
        at_once = [id for id in sorted(episode_ids) if not self.episodes[id].delayed]
        in_order = [wakeup for id in at_once if (wakeup := self.episodes[id].wakeup(id)) is not None]
        assert sorted(wakeups, key=lambda wakeup: wakeup.episode_id) == in_order
        self._complete_groups()
        return in_order

    def _complete_groups(self) -> None:
        for id, state in self.groups.items():
            if state is GroupState.OPEN and all(episode.state in FINAL_STATES for episode in self.members(id)):
                self.groups[id] = GroupState.COMPLETE
