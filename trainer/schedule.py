"""The learning rate of each training step, for policy.py."""

from __future__ import annotations

import logging
import math

from common.config_train import TrainConfig

logger = logging.getLogger(__name__)


def learning_rate(train: TrainConfig, version: int) -> float:
    """Rate of the step that trains `version`: linear warm-up to the full rate, then down to lr_end of it at the end.

    A function of the version alone, so that a trainer that is resumed needs nothing of the steps before: there is no
    state of a scheduler in a checkpoint. The first step after the warm-up has the full rate, the run's last step
    lr_end of it, where there are two of them. Cosine: Loshchilov and Hutter 2017, "SGDR", section 3, without restarts.
    """
    if version < train.warmup_steps:
        return train.learning_rate * (version + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.learning_rate
    progress = (version - train.warmup_steps) / max(train.num_versions - 1 - train.warmup_steps, 1)
    if train.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    # In another order of operations the default would round differently than it always has.
    return train.learning_rate * (1 - (1 - train.lr_end) * progress)


def warn_of_warm_up(run_id: int, *, train: TrainConfig) -> None:
    """Say so where the rate only rises, and what is set of its way down does nothing."""
    if 0 < train.num_versions <= train.warmup_steps:
        logger.warning(
            "the run ends in its warm-up run=%d num_versions=%d warmup_steps=%d: the last step's learning rate is %g",
            run_id,
            train.num_versions,
            train.warmup_steps,
            learning_rate(train, train.num_versions - 1),
        )
