"""Claims as RUN has them when it plays an episode, for tests that have no table of episodes."""

from __future__ import annotations

from uuid import uuid4

from common.config import RunConfig
from common.db.episodes import Claim
from common.episode import Stage


def make_claim(
    config: RunConfig, *, episode: int = 1, group: int = 1, run_id: int = 1, eval_version: int | None = None
) -> Claim:
    """Of an episode without turns; `eval_version` None = it trains."""
    return Claim(
        stage=Stage.RUN,
        episode_id=episode,
        attempt=1,
        token=uuid4(),
        worker="w",
        group_id=group,
        run_id=run_id,
        config=config,
        handler="calculator",
        payload={},
        prepared=None,
        num_turns=0,
        outcome=None,
        transcript=[],
        eval_version=eval_version,
    )
