"""Pictures of learning.py's runs: a curve for each lag, and what each loss makes of old episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning_run import Learned, Setup

COLOURS = ("#0b6e4f", "#2a6fbb", "#c77700", "#b3261e", "#6b4fa0")
NAMES = {
    "behaviour": "ratio to behaviour",
    "decoupled": "decoupled, cap 2",
    "masked": "masked outside [½, 2]",
    "none": "no correction",
    "kept_divisor": "ratio to behaviour, kept groups' tokens",
}


def draw_curves(runs: Mapping[Setup, Learned], path: Path) -> None:
    """A panel for each task: the mean over the seeds at each lag, with the range of the seeds."""
    panels = [(task, sorted({s.lag for s in runs if s.task == task})) for task in sorted({s.task for s in runs})]
    figure, axes = _panels(len(panels))
    for axis, (task, lags) in zip(axes, panels, strict=True):
        axis.set_title(task)
        for lag, colour in zip(lags, COLOURS, strict=False):
            found = [run.rewards for setup, run in runs.items() if (setup.task, setup.lag) == (task, lag)]
            _band(axis, found, label=f"lag {lag} ({len(found)} seeds)", colour=colour)
    _save(figure, axes, path)


def draw_ablation(runs: Mapping[Setup, Learned], path: Path) -> None:
    """A panel for each task and lag at which more than one loss was tried: a curve for each loss."""
    kinds = sorted({(setup.task, setup.lag) for setup in runs})
    panels = [kind for kind in kinds if len({s.recipe for s in runs if (s.task, s.lag) == kind}) > 1]
    if not panels:
        return
    figure, axes = _panels(len(panels))
    for axis, (task, lag) in zip(axes, panels, strict=True):
        axis.set_title(f"{task}, lag {lag}")
        for (recipe, name), colour in zip(NAMES.items(), COLOURS, strict=True):
            found = [run.rewards for s, run in runs.items() if (s.task, s.lag, s.recipe) == (task, lag, recipe)]
            if found:
                _band(axis, found, label=f"{name} ({len(found)} seeds)", colour=colour)
    _save(figure, axes, path)


def _panels(number: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.2 * max(number, 1), 4.2), layout="constrained")
    return figure, list(figure.subplots(1, max(number, 1), sharey=True, squeeze=False)[0])[:number]


def _band(axis: Axes, curves: Sequence[Sequence[float]], *, label: str, colour: str) -> None:
    rewards_SV = np.array(curves)
    versions = np.arange(rewards_SV.shape[1])
    axis.fill_between(versions, rewards_SV.min(axis=0), rewards_SV.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    axis.plot(versions, rewards_SV.mean(axis=0), color=colour, label=label)


def _save(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    for axis in axes:
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
        axis.legend(loc="lower right", fontsize=8, frameon=False)
    if axes:
        axes[0].set_ylabel("mean reward of its episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.size": 10}):
        figure.savefig(path, dpi=130, metadata={"Software": None})
