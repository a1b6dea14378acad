"""The one mechanism of all stages: claim, work, save, hand on; retry what infrastructure broke.

A stage is a function from a claim to what became of the episode. It knows no queue and no lease.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from uuid import uuid4

from common.budgets import budget_s
from common.config import RunConfig
from common.db import episodes, retries, turns
from common.db.episodes import Claim, Wakeup
from common.db.retries import Backoff
from common.db.session import Database
from common.episode import EpisodeState, Stage, Turn
from common.errors import (
    DatabaseUnavailable,
    EpisodeError,
    LeaseLost,
    RollmillError,
    SetupError,
    UnreadableConfig,
    boundary,
)
from common.outcomes import Outcome
from common.settings import Settings
from workers.leases import Leases
from workers.stage_threads import StageTimeout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a stage made of an episode."""

    to: EpisodeState
    why: str
    """For the history."""
    prepared: Mapping[str, object] | None = None
    node: str | None = None
    """In INIT, the node to which the episode is bound by now."""
    outcome: Outcome | None = None
    reward: float | None = None
    reward_parts: Mapping[str, float] | None = None
    last_turn: Turn | None = None
    """In RUN, the turn that is stored together with the move; None = all are stored."""


class Interrupted(RollmillError):
    """The work was told to stop: the lease is lost, or the process is ending."""


Work = Callable[[Claim], "Future[Done]"]
"""Starts a stage's work. Cancelling the future tells the work to stop; it is done when the work has ended."""


class StageWorker:
    """Runs one stage for this process. Waits for nothing but its own work."""

    def __init__(
        self,
        stage: Stage,
        work: Work,
        *,
        database: Database,
        leases: Leases,
        settings: Settings,
        worker: str,
        publish: Callable[[list[Wakeup]], None],
        given_up: Callable[[int], object] = lambda num: None,
        is_able: Callable[[], bool] = lambda: True,
    ) -> None:
        """`given_up` is called with the number of works that should have ended and still run in this process.

        While `is_able` says no, nothing is claimed: the reaper announces the episode again.
        """
        self._stage = stage
        self._work = work
        self._database = database
        self._leases = leases
        self._settings = settings
        self._worker = worker
        self._publish = publish
        self._given_up = given_up
        self._is_able = is_able
        self._stuck: list[Future[Done]] = []
        self._stuck_lock = threading.Lock()
        self._configs: dict[int, RunConfig] = {}
        self._unreadable: set[str] = set()
        self._stopping = threading.Event()

    def perform(self, episode_id: int, attempt: int) -> None:
        """Do the stage for an episode, if it still waits for it. A second delivery of a message does nothing."""
        wakeup = Wakeup(stage=self._stage, episode_id=episode_id, attempt=attempt)
        try:
            if self._stopping.is_set() or not self._is_able() or (claim := self._claim(wakeup)) is None:
                return
            self._publish(self._carry_out(claim))
        except LeaseLost as error:
            logger.warning("gave up stage=%s episode=%d reason=%s", self._stage, episode_id, error)
        except DatabaseUnavailable as error:
            logger.warning("left to the reaper stage=%s episode=%d reason=%s", self._stage, episode_id, error)
        except UnreadableConfig as error:
            self._leave_alone(error)

    def stop(self) -> None:
        """Hand all claims back, so that the process can end within seconds."""
        self._stopping.set()
        self._leases.stop_all()

    def _claim(self, wakeup: Wakeup) -> Claim | None:
        with self._database.autocommit() as conn:
            return episodes.claim(
                conn,
                wakeup,
                worker=self._worker,
                token=uuid4(),
                lease_s=self._settings.lease_s,
                configs=self._configs,
                node=self._settings.node,
            )

    def _leave_alone(self, error: UnreadableConfig) -> None:
        """Say once why the run's episodes wait; the reaper announces them again."""
        if str(error) not in self._unreadable:
            self._unreadable.add(str(error))
            logger.error("takes no episodes stage=%s %s", self._stage, error)

    def _carry_out(self, claim: Claim) -> list[Wakeup]:
        try:
            with boundary(Outcome.HANDLER_FAILED, f"{self._stage} of {claim.handler}"):
                future = self._work(claim)
                woken = threading.Event()
                future.add_done_callback(lambda _: woken.set())
                with self._leases.held(claim.token, woken.set):
                    return self._hand_on(claim, self._result(claim, future, woken))
        except EpisodeError as error:
            return self._retry(claim, error)
        except SetupError as error:
            # What this machine lacks, another may have.
            return self._retry(claim, EpisodeError(Outcome.HANDLER_FAILED, f"on worker {self._worker}: {error}"))
        except Interrupted:
            if self._stopping.is_set():
                return self._give_back(claim)
            raise LeaseLost(f"episode {claim.episode_id}: somebody else has it now") from None

    def _result(self, claim: Claim, future: Future[Done], woken: threading.Event) -> Done:
        """Waits for the work's end, until its budget is used up. `woken` is set before that if the work must stop."""
        limit_s = budget_s(self._stage, claim.rollout, self._settings)
        in_time = self._stopping.is_set() or woken.wait(limit_s)
        if not future.done():
            ended = self._stop(claim, future)
            if in_time:
                raise Interrupted
            if not ended or future.exception() is not None:
                detail = f"{self._stage} of {claim.handler} did not end within {limit_s:g} s"
                raise EpisodeError(Outcome.STAGE_TIMEOUT, detail)
        try:
            return future.result()
        except (CancelledError, StageTimeout):
            raise Interrupted from None
        except Exception:
            raise
        except BaseException as error:
            # Of a handler, whatever it is: it would end this thread of the pool, whose message then waits for ever.
            detail = f"{self._stage} of {claim.handler}: {type(error).__name__}: {error}"
            raise EpisodeError(Outcome.HANDLER_FAILED, detail) from error

    def _stop(self, claim: Claim, future: Future[Done]) -> bool:
        """Tell the work to end, and give it up if it does not: without a claim it can write nothing. False = given up.

        Waits for: the end of the work, for `stage_grace_s`.
        """
        future.cancel()
        if wait([future], self._settings.stage_grace_s).done:
            return True
        with self._stuck_lock:
            self._stuck = [*(stuck for stuck in self._stuck if not stuck.done()), future]
            num_stuck = len(self._stuck)
        logger.error(
            "given up, since it does not end when told to stage=%s episode=%d attempt=%d handler=%s given_up=%d",
            self._stage,
            claim.episode_id,
            claim.attempt,
            claim.handler,
            num_stuck,
        )
        self._given_up(num_stuck)
        return False

    def _hand_on(self, claim: Claim, done: Done) -> list[Wakeup]:
        many = episodes.leaves_stragglers(claim, done.to)
        with self._database.begin() if many else self._database.autocommit() as conn:
            if done.last_turn is not None and done.outcome is not None:
                wakeup: Wakeup | None = turns.save_last(conn, claim, done.last_turn, outcome=done.outcome)
            else:
                wakeup = episodes.move(
                    conn,
                    claim,
                    done.to,
                    why=done.why,
                    prepared=done.prepared,
                    node=done.node,
                    outcome=done.outcome,
                    reward=done.reward,
                    reward_parts=done.reward_parts,
                )
        logger.info("stage=%s run=%d episode=%d %s", self._stage, claim.run_id, claim.episode_id, done.why)
        return [wakeup] if wakeup else []

    def _retry(self, claim: Claim, error: EpisodeError) -> list[Wakeup]:
        logger.warning(
            "stage failed stage=%s episode=%d attempt=%d %s", self._stage, claim.episode_id, claim.attempt, error
        )
        # An episode with a sandbox starts over: a half-done command may have changed it.
        afresh = claim.stage is not Stage.EVAL and (claim.prepared or {}).get("sandbox") is not None
        with self._database.begin() as conn:
            wakeup = retries.retry(
                conn,
                claim,
                outcome=error.outcome,
                detail=error.detail,
                afresh=afresh or claim.stage is Stage.INIT,
                max_attempts=1 if error.is_final else self._settings.max_attempts,
                backoff=Backoff(first_s=self._settings.retry_backoff_s, max_s=self._settings.retry_backoff_max_s),
            )
        return [wakeup] if wakeup else []

    def _give_back(self, claim: Claim) -> list[Wakeup]:
        with self._database.begin() as conn:
            return retries.release(conn, [claim.token], why="the worker is shutting down")
