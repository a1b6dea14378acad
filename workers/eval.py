"""EVAL: scores an episode's transcript. The trainer takes the group when all its episodes are final."""

from __future__ import annotations

from collections.abc import Callable

from common.db.episodes import Claim
from common.episode import EpisodeState, Message
from workers.handlers.base import Handler, Score, returned
from workers.init import PreparedEpisode
from workers.stage import Done


class Eval:
    """The stage's function and what it needs."""

    def __init__(self, *, handler: Callable[[str], Handler]) -> None:
        self._handler = handler

    def __call__(self, claim: Claim) -> Done:
        first = PreparedEpisode.model_validate(claim.prepared).messages
        said = [Message.model_validate(message) for turn in claim.transcript for message in turn]
        made = self._handler(claim.handler).eval(claim.payload, (*first, *said))
        score = returned(made, Score, f"eval of handler {claim.handler}")
        return Done(
            to=EpisodeState.SCORED, why=f"reward={score.reward:g}", reward=score.reward, reward_parts=score.parts
        )
