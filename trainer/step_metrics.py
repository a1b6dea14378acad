"""What a step says of the episodes that it took, beside what the policy says of training them. loop.py stores both."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from common.db.steps import Step
from trainer.advantages import Advantages
from trainer.samples import Sample

logger = logging.getLogger(__name__)


def taken_metrics(
    samples: Sequence[Sample],
    advantages: Advantages,
    *,
    num_groups: int,
    rewards: Sequence[float],
    shaped: Sequence[float],
    version: int,
    max_staleness: int,
) -> dict[str, float]:
    """Means over the episodes' `rewards`, raw and `shaped`, counts, and how old the sampled tokens are."""
    lags = np.concatenate([np.zeros(0, int), *(version - sample.versions_L[sample.mask_L] for sample in samples)])
    return {
        "reward_mean": _mean(np.array(rewards)),
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "shaped_reward_mean": _mean(np.array(shaped)),
        "num_groups": float(num_groups),
        "num_episodes": float(len(rewards)),
        "num_rows": float(len(samples)),
        "num_tokens": float(len(lags)),
        "zero_variance_groups": float(advantages.zero_variance_groups),
        "singleton_groups": float(advantages.singleton_groups),
        "left_out_episodes": float(len(advantages.left_out)),
        **lag_metrics(lags, max_staleness=max_staleness),
    }


def lag_metrics(lags_N: np.ndarray, *, max_staleness: int) -> dict[str, float]:
    """Of the lags of N sampled tokens, in versions: mean, largest, and the share of the tokens at each up to the bound.

    The shares add up to 1. All are 0 where nothing was sampled.
    """
    largest = int(lags_N.max()) if len(lags_N) else 0
    shares = {f"lag_{lag}_fraction": _mean(lags_N == lag) for lag in range(max(max_staleness, largest) + 1)}
    return {"lag_mean": _mean(lags_N), "lag_max": float(largest), **shares}


def warn_of_silence(step: Step, metrics: Mapping[str, float]) -> None:
    """Say that a step teaches nothing, and what took the gradient; `metrics` are those of what was taken."""
    logger.warning(
        "%s, so there is nothing to learn run=%d step=%d version=%d groups=%d zero_variance=%d episodes=%d "
        "left_out_as_truncated=%d",
        _why_silent(metrics),
        step.run_id,
        step.id,
        step.version_in,
        metrics["num_groups"],
        metrics["zero_variance_groups"],
        metrics["num_episodes"],
        metrics["left_out_episodes"],
    )


def _why_silent(metrics: Mapping[str, float]) -> str:
    if metrics["num_tokens"] == 0:
        return "not one sampled token in the groups of a step"
    if metrics["left_out_episodes"] == metrics["num_episodes"]:
        return "every episode of a step was cut off and is left out (train.truncated)"
    return "no episode of a step has an advantage"


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
