"""A policy whose training step takes a given time and changes nothing; its weights are published as any others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from trainer.policy import Policy
from trainer.samples import Sample


class TimedPolicy(Policy):
    """What trainer/loop.py trains in benchmarks/async_speedup.py."""

    step_s = 0.0
    """How long a training step takes."""

    def train_step(
        self, samples: Sequence[Sample], advantages: Mapping[int, float], *, version: int
    ) -> dict[str, float]:
        """Wait as long as a step takes; the metrics are those that the loop logs."""
        time.sleep(self.step_s)
        return {"loss": 0.0, "grad_norm": 0.0, "num_updates": 1.0}
