"""EVAL: scores an episode's transcript. The trainer takes the group when all its episodes are final."""

from __future__ import annotations

from collections.abc import Callable

from common.db import turns
from common.db.episodes import Claim
from common.db.session import Database
from common.episode import EpisodeState
from workers.handlers.base import Handler
from workers.init import PreparedEpisode
from workers.stage import Done


class Eval:
    """The stage's function and what it needs."""

    def __init__(self, database: Database, *, handler: Callable[[str], Handler]) -> None:
        self._database = database
        self._handler = handler

    def __call__(self, claim: Claim) -> Done:
        with self._database.autocommit() as conn:
            transcript = turns.load_transcript(conn, claim.episode_id, claim.attempt)
        first = PreparedEpisode.model_validate(claim.prepared).messages
        score = self._handler(claim.handler).eval(claim.payload, (*first, *transcript))
        return Done(
            to=EpisodeState.SCORED, why=f"reward={score.reward:g}", reward=score.reward, reward_parts=score.parts
        )
