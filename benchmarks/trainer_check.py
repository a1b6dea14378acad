"""`python -m benchmarks.trainer_check`: the trainer's objectives in other packings, and against TRL's; the last line
has the figures. Exit code 1 when one is out of bounds.

Each objective is computed on random rows, some of which share an episode, in one batch, and then again: padded wider,
in another order, in micro-batches, as two ranks of uneven token counts whose losses and gradients add up, and in
float64. The loss and each gradient must come out the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

import torch

from benchmarks.objectives import Row, compute, objectives, random_rows
from common.config_train import TrainConfig

MAX_DIFFERENCE = 1e-6
MAX_TRL_DIFFERENCE = 1e-5
NO_WEIGHT = {"correction": "none", "allow_uncorrected": True}
"""TRL's loss takes the old policy for the one that sampled."""
NUM_ROWS, NUM_EPISODES = 12, 8
MICROBATCHES = {
    "packing": [list(range(NUM_ROWS))[::-1]],
    "split": [[3, 0, 6], [1], [2, 10, 4, 5, 11], [7, 8], [9]],
    "ranks": [[0, 1], list(range(2, NUM_ROWS))],
}
"""Which rows come together, in which order."""


def invariance(rows: Sequence[Row], train: TrainConfig) -> dict[str, float]:
    """Largest difference of the loss and of any gradient to those of one batch, by what was changed."""
    together = [list(range(NUM_ROWS))]
    expected = compute(rows, batches=together, train=train)
    found = {"padding": compute(rows, batches=together, train=train, extra=37)}
    found |= {name: compute(rows, batches=batches, train=train) for name, batches in MICROBATCHES.items()}
    found["float64"] = compute([row.to(torch.float64) for row in rows], batches=together, train=train)
    return {name: expected.distance(computed) for name, computed in found.items()}


def agreement(rows: Sequence[Row]) -> dict[str, float]:
    """Largest difference to TRL's loss and gradients, by case."""
    from benchmarks.trl_losses import CASES, trl_loss

    sampled = [row for row in rows if row.mask_L.any()]
    together = [list(range(len(sampled)))]
    return {
        name: compute(
            sampled, batches=together, train=TrainConfig.model_validate({"anchor": "proximal"} | ours | NO_WEIGHT)
        ).distance(trl_loss(sampled, **theirs))
        for name, (ours, theirs) in CASES.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a kind of comparison, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="sets of random rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    worst: dict[str, float] = {}
    num_cases = 0
    has_trl = importlib.util.find_spec("trl") is not None
    for seed in range(options.seeds):
        rows = random_rows(num_rows=NUM_ROWS, num_episodes=NUM_EPISODES, seed=seed)
        for train in objectives():
            found = invariance(rows, train)
            num_cases += len(found)
            worst |= {name: max(difference, worst.get(name, 0.0)) for name, difference in found.items()}
        # Of episodes with several rows TRL knows nothing.
        whole = random_rows(num_rows=NUM_ROWS, seed=seed)
        for name, difference in (agreement(whole) if has_trl else {}).items():
            print(f"seed={seed} trl={name!r} max_abs_diff={difference:.1e}")
            num_cases += 1
            worst["trl"] = max(difference, worst.get("trl", 0.0))
    bounds = {name: MAX_TRL_DIFFERENCE if name == "trl" else MAX_DIFFERENCE for name in worst}
    good = all(worst[name] <= bound for name, bound in bounds.items())
    figures = " ".join(f"max_abs_diff_{name}={difference:.1e}" for name, difference in worst.items())
    without = "" if has_trl else " trl=not_installed"
    print(f"trainer: cases={num_cases} {figures}{without} result={'ok' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
