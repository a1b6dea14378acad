"""The episode state machine and a simple model of it in memory: each operation is done on both and must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import text

from common.db import episodes, steps, turns, versions
from common.db.episodes import Claim, Wakeup
from common.db.steps import Step, TrainedEpisode
from common.episode import FINAL_STATES, STAGE_OF, EpisodeState, GroupState, Stage
from common.errors import LeaseLost, SetupError
from common.outcomes import Outcome
from common.weights import Published
from tests.integration.world import World, make_turn

MAX_ATTEMPTS = 2
MAX_STALENESS = 1
PUBLISHED = Published(path=Path("weights"), manifest_sha256="0" * 64)


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

    def give_back(self, *, afresh: bool, outcome: Outcome) -> None:
        self.failures += 1
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
        free = episode.token is None and episode.wakeup(wakeup.episode_id) == wakeup
        assert (claim is not None) == free
        if claim is not None:
            assert (claim.prepared is None) == (claim.stage is Stage.INIT)
            assert claim.outcome == episode.outcome
            episode.token = claim.token
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
        to, result = {
            Stage.INIT: (EpisodeState.READY, {"prepared": {"sandbox": "box" if sandbox else None}}),
            Stage.RUN: (EpisodeState.SAMPLED, {"outcome": outcome}),
            Stage.EVAL: (EpisodeState.SCORED, {"reward": 0.5, "reward_parts": {"right": 0.5}}),
        }[claim.stage]
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

    def retry(self, claim: Claim, outcome: Outcome) -> list[Wakeup]:
        """What a stage does after a failure of infrastructure."""
        episode = self.episodes[claim.episode_id]
        afresh = claim.stage is Stage.INIT or (claim.stage is Stage.RUN and episode.sandbox)
        arguments = {"outcome": outcome, "detail": "broken", "afresh": afresh, "max_attempts": MAX_ATTEMPTS}
        if not self.holds(claim):
            with pytest.raises(LeaseLost), self.database.begin() as conn:
                episodes.retry(conn, claim, **arguments)
            return []
        with self.database.begin() as conn:
            wakeup = episodes.retry(conn, claim, **arguments)
        episode.give_back(afresh=afresh, outcome=outcome)
        return self._announced([wakeup] if wakeup else [], [claim.episode_id])

    def release(self, claims: list[Claim]) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = episodes.release(conn, [claim.token for claim in claims], why="shutting down")
        held = {claim.episode_id for claim in claims if self.holds(claim)}
        for episode in (self.episodes[id] for id in held):
            if episode.needs_sandbox:
                episode.start_over()
            else:
                episode.move(episode.state)
        return self._announced(wakeups, held)

    def reap(self) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = episodes.reap(conn, max_attempts=MAX_ATTEMPTS)
        expired = [id for id, episode in self.episodes.items() if episode.expired]
        for episode in (self.episodes[id] for id in expired):
            episode.give_back(afresh=episode.needs_sandbox, outcome=Outcome.LEASE_LOST)
        return self._announced(wakeups, expired)

    def resend(self) -> list[Wakeup]:
        with self.database.begin() as conn:
            wakeups = episodes.resend(conn, after_s=0)
        waiting = [id for id, episode in self.episodes.items() if episode.token is None]
        return self._announced(wakeups, waiting)

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
        in_order = [wakeup for id in sorted(episode_ids) if (wakeup := self.episodes[id].wakeup(id)) is not None]
        assert sorted(wakeups, key=lambda wakeup: wakeup.episode_id) == in_order
        for id, state in self.groups.items():
            if state is GroupState.OPEN and all(episode.state in FINAL_STATES for episode in self.members(id)):
                self.groups[id] = GroupState.COMPLETE
        return in_order
