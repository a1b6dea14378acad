"""What benchmarks/async_speedup.py found, as lines, as a Markdown table and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.speedup_ways import Shape, Trained, synchronous_s
from benchmarks.tailed_engine import MEAN_TOKENS, MEDIAN_TOKENS, TAIL_FACTOR, TAIL_SHARE

OVER_COUPLED, OVER_SYNCHRONOUS = 3.0, 2.5
"""How many times faster than these the best staleness is to be."""
WIDTH = 120
COLUMNS = (
    "way",
    "seconds",
    "over coupled",
    "over staleness 0",
    "episodes/s",
    "engine busy",
    "trainer idle",
    "groups dropped",
    "tokens wasted",
    "lag mean",
    "lag max",
    "of the tail",
)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean=statistics.fmean(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one way, over all seeds."""

    seconds: Spread
    over_coupled: Spread
    """Seconds of coupled by its own, of the same seed."""
    over_synchronous: Spread
    episodes_per_s: float
    """Trained."""
    engine_busy: float
    """Share of its places that decode."""
    trainer_idle: float
    """Share of the time in which no step is under way."""
    groups_dropped: float
    """In a run."""
    tokens_wasted: float
    """Share of those that were sampled and not trained."""
    lags: Counter[int]
    long_share: float
    """Trained episodes of the tail, as a share of all."""


def by_kind(trained: Sequence[Trained]) -> dict[str, list[Trained]]:
    found: dict[str, list[Trained]] = defaultdict(list)
    for one in trained:
        found[one.way.kind].append(one)
    return {kind: sorted(of_kind, key=lambda one: one.way.seed) for kind, of_kind in sorted(found.items())}


def figures(trained: Sequence[Trained], shape: Shape) -> dict[str, Figures]:
    """By kind of way."""
    kinds = by_kind(trained)
    return {kind: _figures(of_kind, kinds, shape) for kind, of_kind in kinds.items()}


def _figures(of_kind: Sequence[Trained], kinds: Mapping[str, Sequence[Trained]], shape: Shape) -> Figures:
    def over(other: str) -> Spread:
        return Spread.of([slow.seconds / one.seconds for slow, one in zip(kinds[other], of_kind, strict=True)])

    seconds = sum(one.seconds for one in of_kind)
    sampled = sum(one.sampled_tokens for one in of_kind)
    lags = sum((one.lags for one in of_kind), Counter[int]())
    return Figures(
        seconds=Spread.of([one.seconds for one in of_kind]),
        over_coupled=over("coupled"),
        over_synchronous=over("staleness-0"),
        episodes_per_s=lags.total() / seconds,
        engine_busy=sampled * shape.token_s / shape.batch / seconds,
        trainer_idle=1 - len(of_kind) * shape.num_versions * shape.step_s / seconds,
        groups_dropped=sum(one.dropped.total() for one in of_kind) / len(of_kind),
        tokens_wasted=1 - sum(one.trained_tokens for one in of_kind) / sampled,
        lags=lags,
        long_share=sum(one.long_episodes for one in of_kind) / lags.total(),
    )


def line(one: Trained, shape: Shape) -> str:
    """One way of one seed."""
    lags = " ".join(f"{lag}:{num}" for lag, num in sorted(one.lags.items()))
    return (
        f"{one.way.name}: seconds={one.seconds:.1f} synchronous_s={synchronous_s(one.way.seed, shape):.1f} "
        f"dropped={dict(one.dropped)} sampled_tokens={one.sampled_tokens} trained_tokens={one.trained_tokens} "
        f"long={one.long_episodes} lags={lags}"
    )


def best(found: Mapping[str, Figures], *, wait: bool) -> str:
    """The way with staleness that is fastest, of those that drop late groups or of those that wait for them."""
    kinds = [kind for kind in found if kind not in ("coupled", "staleness-0") and kind.endswith("-wait") == wait]
    return min(kinds, key=lambda kind: found[kind].seconds.mean)


def table(found: Mapping[str, Figures]) -> str:
    """In Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for kind, way in found.items():
        mean_lag = sum(lag * num for lag, num in way.lags.items()) / way.lags.total()
        rows.append(
            (
                kind.replace("-", " "),
                f"{way.seconds.mean:.1f} ({way.seconds.low:.1f} to {way.seconds.high:.1f})",
                str(way.over_coupled),
                str(way.over_synchronous),
                f"{way.episodes_per_s:.1f}",
                f"{way.engine_busy:.0%}",
                f"{way.trainer_idle:.0%}",
                f"{way.groups_dropped:.1f}",
                f"{way.tokens_wasted:.0%}",
                f"{mean_lag:.2f}",
                str(max(way.lags)),
                f"{way.long_share:.1%}",
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def overhead(of_kind: Sequence[Trained], shape: Shape) -> float:
    """Share of time that a synchronous way takes beyond the longest episodes, the steps and the loads."""
    least_s = sum(synchronous_s(one.way.seed, shape) for one in of_kind)
    return sum(one.seconds for one in of_kind) / least_s - 1


def write_report(path: Path, trained: Sequence[Trained], shape: Shape, *, last_line: str) -> None:
    """The whole comparison in Markdown, with a picture beside it."""
    found, kinds = figures(trained, shape), by_kind(trained)
    picture = path.with_suffix(".png")
    draw(found, picture)
    spent = (
        "Seconds and ratios are means over the seeds, with the lowest and the highest; a ratio compares the same seed. "
        "Beyond what the longest episodes, the steps and the loads take by themselves, coupled took "
        f"{overhead(kinds['coupled'], shape):.0%} and staleness 0 {overhead(kinds['staleness-0'], shape):.0%}. Every "
        "run starts with empty queues and ends with its last, slowest groups; a longer run has less of both."
    )
    lines = "\n".join(line(one, shape) for of_kind in kinds.values() for one in of_kind)
    parts = (
        "# Training without waiting for the longest episode: `python -m benchmarks.async_speedup`",
        f"`{last_line}`",
        *(textwrap.fill(part, WIDTH) for part in _setting(shape)),
        f"![Seconds of each way, and how old the trained episodes were]({picture.name})",
        table(found).rstrip(),
        textwrap.fill(spent, WIDTH),
        "`synchronous_s` = what the synchronous ways take without any overhead; `lags` = versions:episodes",
        f"```\n{lines}\n```",
    )
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _setting(shape: Shape) -> tuple[str, str]:
    """What was compared, in words."""
    return (
        f"One engine that decodes {shape.batch} requests at once; more wait in it. A token takes {shape.token_s:g} s, "
        f"the median episode {MEDIAN_TOKENS} tokens, {TAIL_SHARE:.0%} of them {TAIL_FACTOR} times as many, the mean "
        f"{MEAN_TOKENS:.1f}. A training step takes as long as the mean episode, {shape.step_s:.2f} s, and a load "
        f"{shape.load_s:g} s. Each way trains {shape.num_versions} versions of {shape.groups_per_step} groups of "
        f"{shape.group_size} episodes. How long an episode is follows from the seed, its task and its place in the "
        "group, so that every way meets the same ones.",
        "`coupled` is one process without queues or database: it plays a batch, all episodes at once, waits for the "
        "last, trains, loads, and begins again. The others are the whole pipeline on RabbitMQ and Postgres. `wait` is "
        '`train.late_groups = "wait"`, the default; without it groups that got too old are dropped, so that hardly any '
        "episode of the tail is trained (last column; the ways that drop nothing train all of them). What was sampled "
        "for dropped groups took the engine's time, and is in the seconds.",
    )


def draw(found: Mapping[str, Figures], path: Path) -> None:
    """Seconds of each way, and how old what it trained was. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = list(found)
    labels = [kind.replace("-", " ") for kind in kinds]
    means = [found[kind].seconds.mean for kind in kinds]
    errors = [
        [found[kind].seconds.mean - found[kind].seconds.low for kind in kinds],
        [found[kind].seconds.high - found[kind].seconds.mean for kind in kinds],
    ]
    left.barh(labels, means, xerr=errors, color="tab:blue", alpha=0.8, capsize=3)
    for index, kind in enumerate(kinds):
        left.text(means[index] / 2, index, f"{found[kind].over_coupled.mean:.1f}x", ha="center", va="center", color="w")
    left.set(title="the same versions and groups", xlabel="seconds (mean, lowest to highest)")
    start = [0.0] * len(kinds)
    for lag in range(max(max(way.lags) for way in found.values()) + 1):
        shares = [way.lags[lag] / way.lags.total() for way in found.values()]
        right.barh(labels, shares, left=start, label=str(lag))
        start = [before + share for before, share in zip(start, shares, strict=True)]
    right.set(title="trained episodes by lag", xlabel="share", yticklabels=[])
    right.legend(title="versions", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
