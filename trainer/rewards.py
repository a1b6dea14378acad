"""From the evaluation's rewards to those that are trained: penalties for length and for distance to the start weights.

Next: trainer/advantages.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.config_train import TrainConfig
from common.episode import ScoredEpisode
from common.outcomes import Outcome
from trainer.advantages import GroupRewards

TRUNCATED = frozenset({Outcome.TOKEN_LIMIT, Outcome.CONTEXT_LIMIT})
"""Outcomes of an answer that was cut off for its length. They come of the engine's finish reason: an episode's last
token says nothing, as models close their turns with other tokens than the tokenizer's end."""


def overlong_penalty(num_tokens: int, *, limit: int, buffer: int) -> float:
    """What is taken off the reward for length: 0 up to limit - buffer tokens, 1 from `limit` on, linear in between.

    Soft overlong punishment: Yu et al. 2025, "DAPO", section 3.4.

    >>> [overlong_penalty(count, limit=100, buffer=20) for count in (80, 85, 100, 130)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return min(max((num_tokens - (limit - buffer)) / buffer, 0.0), 1.0)


def group_rewards(
    episodes: Sequence[ScoredEpisode], *, group_id: int, train: TrainConfig, kl_by_episode: Mapping[int, float]
) -> GroupRewards:
    """Raw and shaped rewards of a group's episodes with an outcome of the agent.

    kl_by_episode: nats over all tokens of an episode; an episode that is not in it has no such penalty.
    """
    raw = {episode.episode_id: episode.reward for episode in episodes}
    shaped = dict(raw)
    for episode in episodes:
        if train.overlong_tokens is not None and train.overlong_buffer is not None:
            num_tokens = sum(len(turn.sampled_ids) for turn in episode.turns)
            shaped[episode.episode_id] -= overlong_penalty(
                num_tokens, limit=train.overlong_tokens, buffer=train.overlong_buffer
            )
        if train.kl_coefficient is not None and episode.episode_id in kl_by_episode:
            shaped[episode.episode_id] -= train.kl_coefficient * kl_by_episode[episode.episode_id]
    return GroupRewards(group_id=group_id, raw=raw, shaped=shaped)


def is_trained(episode: ScoredEpisode, *, train: TrainConfig) -> bool:
    """False where an episode was cut off and such episodes are left out of the loss (DAPO, overlong filtering)."""
    return train.truncated == "train" or Outcome(episode.outcome) not in TRUNCATED
