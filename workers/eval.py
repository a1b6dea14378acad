"""EVAL: scores an episode's transcript, or files. The trainer takes the group when all its episodes are final."""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.db.episodes import Claim
from common.episode import EpisodeState, Message
from common.outcomes import Outcome
from workers.evaluator.judging import Judging
from workers.handlers.base import Handler, JudgesFiles, Score, returned
from workers.init import PreparedEpisode
from workers.stage import Done

logger = logging.getLogger(__name__)


class Eval:
    """The stage's function and what it needs."""

    def __init__(self, *, handler: Callable[[str], Handler], judging: Judging | None = None) -> None:
        """`judging`: for handlers that judge files; None = there are none."""
        self._handler = handler
        self._judging = judging

    def __call__(self, claim: Claim) -> Done:
        prepared = PreparedEpisode.model_validate(claim.prepared)
        said = [Message.model_validate(message) for turn in claim.transcript for message in turn]
        score = self._score(claim, prepared, (*prepared.messages, *said))
        if score.tampered:
            logger.warning("the agent tampered with its tests run=%d episode=%d", claim.run_id, claim.episode_id)
        return Done(
            to=EpisodeState.SCORED,
            why=f"reward={score.reward:g}{' tampered' if score.tampered else ''}",
            outcome=Outcome.TAMPERED if score.tampered else None,
            reward=score.reward,
            reward_parts=score.parts,
        )

    def _score(self, claim: Claim, prepared: PreparedEpisode, transcript: tuple[Message, ...]) -> Score:
        handler = self._handler(claim.handler)
        if not isinstance(handler, JudgesFiles):
            return returned(handler.eval(claim.payload, transcript), Score, f"eval of handler {claim.handler}")
        assert self._judging is not None, "a fleet process has one"
        made = handler.judge(claim.payload, transcript, self._judging.judge(claim, prepared.spec))
        return returned(made, Score, f"judge of handler {claim.handler}")
