"""The reward curve of a run: as characters for the terminal, as a PNG for everybody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.db.evaluations import Evaluation

EIGHTHS = " ▁▂▃▄▅▆▇█"
MAX_COLUMNS = 8
"""Width of a version in a short curve."""
SMOOTH_OVER = 5
"""Versions in the moving mean."""

Curve = Sequence[float | None]
"""[policy versions] mean reward; None = the version has no episodes."""
Point = tuple[int, float, float]
"""(policy version, mean reward, its standard error)."""


def limits(curve: Curve) -> tuple[float, float]:
    """The range of the reward axis: at least 0..1."""
    means = [mean for mean in curve if mean is not None]
    return min([0.0, *means]), max([1.0, *means])


def in_bins(curve: Curve, *, num_bins: int) -> list[float | None]:
    """The curve in at most so many values, neighbours averaged."""
    num_bins = min(num_bins, len(curve))
    bins = [curve[len(curve) * n // num_bins : len(curve) * (n + 1) // num_bins] for n in range(num_bins)]
    return [_mean([mean for mean in part if mean is not None]) for part in bins]


def moving_mean(curve: Curve) -> list[float | None]:
    """At each version with episodes, the mean over it and its nearest two on either side that have some."""
    known = [mean for mean in curve if mean is not None]
    centres = iter(range(len(known)))
    return [None if mean is None else _mean(_around(known, next(centres))) for mean in curve]


def _around(values: Sequence[float], centre: int) -> Sequence[float]:
    return values[max(centre - SMOOTH_OVER // 2, 0) : centre + SMOOTH_OVER // 2 + 1]


def sparkline(curve: Curve, *, width: int) -> str:
    """The curve in one line, on a scale of at least 0..1."""
    return _rows(curve, width=width, height=1)[0] if curve else ""


def draw_in_terminal(curve: Curve, *, width: int, height: int = 10) -> str:
    """The curve as columns with axes, at most `width` characters wide. Empty when there is nothing to draw."""
    if all(mean is None for mean in curve):
        return ""
    low, high = limits(curve)
    width = max(width, 20) - 7
    per_version = max(1, min(MAX_COLUMNS, width // len(curve)))
    stretched = [mean for mean in curve for _ in range(per_version)]
    rows = _rows(stretched, width=width, height=height)
    labels = {0: f"{high:5.2f} ┤", height // 2: f"{(high + low) / 2:5.2f} ┤", height - 1: f"{low:5.2f} ┤"}
    lines = [labels.get(number, "      │") + row.rstrip() for number, row in enumerate(rows)]
    length, last = len(rows[0]), str(len(curve) - 1)
    room = max(length - 1 - len(last), 0)
    axis = "policy version".center(room) if room > 16 else " " * room
    return "\n".join([*lines, "      └" + "─" * length, "       0" + axis + last])


def held_out_points(evaluations: Sequence[Evaluation]) -> list[Point]:
    """Those of the evaluations that have a figure."""
    return [
        (one.version, one.mean_reward, one.standard_error or 0.0) for one in evaluations if one.mean_reward is not None
    ]


def write_png(curve: Curve, path: Path, *, title: str, held_out: Sequence[Point] = ()) -> None:
    """Draw the curve with its moving mean, and evaluations, into a file; the folder is made.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    low, high = limits([*curve, *(mean for _, mean, _ in held_out)])
    span = high - low
    axes.set(title=title, xlabel="policy version", ylabel="mean reward", ylim=(low - 0.02 * span, high + 0.02 * span))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for smoothed, style, label in (
        (curve, "o", "mean over a version's episodes"),
        (moving_mean(curve), "-", f"mean of {SMOOTH_OVER} versions"),
    ):
        known = [(version, mean) for version, mean in enumerate(smoothed) if mean is not None]
        axes.plot(
            [version for version, _ in known],
            [mean for _, mean in known],
            style,
            color="tab:blue",
            alpha=0.45 if style == "o" else 1.0,
            label=label,
        )
    if held_out:
        numbers, means, errors = zip(*held_out, strict=True)
        axes.errorbar(
            numbers, means, yerr=errors, fmt="s-", capsize=3, color="tab:orange", label="held-out tasks ± s.e."
        )
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _rows(curve: Curve, *, width: int, height: int) -> list[str]:
    """The curve as columns of blocks, top row first. A known value shows at least the lowest block."""
    low, high = limits(curve)
    eighths = [
        0 if mean is None else max(1, round((mean - low) / (high - low) * height * 8))
        for mean in in_bins(curve, num_bins=width)
    ]
    return ["".join(EIGHTHS[min(max(column - 8 * row, 0), 8)] for column in eighths) for row in reversed(range(height))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
