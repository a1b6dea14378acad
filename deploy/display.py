"""Shows a run while it goes: a live panel on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.db.evaluations import Evaluation
from common.db.snapshot import Snapshot
from common.episode import EpisodeState, GroupState, Stage
from deploy.curve import sparkline
from deploy.progress import View, duration, evaluated, last_evaluation, last_reward, short_failure
from deploy.supervisor import ProcessStatus, State

PLAIN_EVERY_S = 5.0
SPARKLINE_WIDTH = 26
LIVE_EVERY_S = 0.25


class Display(Protocol):
    """Where frames go."""

    def show(self, view: View) -> None:
        """Show this frame; called a few times a second."""
        ...


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """The display that suits the console; at the end of the block the last frame stays on the screen."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            throttled = _Throttled(lambda view: live.update(render(view), refresh=True), every_s=LIVE_EVERY_S)
            yield throttled
            throttled.flush()
    else:
        throttled = _Throttled(
            lambda view: console.print(plain_line(view), soft_wrap=True, highlight=False, markup=False),
            every_s=PLAIN_EVERY_S,
        )
        yield throttled
        throttled.flush()


class _Throttled:
    """Shows a frame when the last one is old enough, and the very last one always."""

    def __init__(self, draw: Callable[[View], None], *, every_s: float) -> None:
        self._draw = draw
        self._every_s = every_s
        self._drawn_at_s = float("-inf")
        self._held_back: View | None = None

    def show(self, view: View) -> None:
        self._held_back = view
        if time.monotonic() - self._drawn_at_s >= self._every_s:
            self._drawn_at_s = time.monotonic()
            self.flush()

    def flush(self) -> None:
        if self._held_back is not None:
            self._draw(self._held_back)
            self._held_back = None


def render(view: View) -> RenderableType:
    """The panel of one frame."""
    parts: list[RenderableType] = [_figures(view)]
    if view.snapshot is not None:
        parts += [Text(), _stages(view.snapshot), Text(), _groups(view.snapshot)]
    parts += [_processes(view.processes), *(Text(line, "yellow") for line in _last_ends(view.processes))]
    parts += [Text(f"data {view.data_folder}   logs {view.data_folder / 'logs'}", "dim")]
    if view.snapshot is not None and view.snapshot.last_failure is not None:
        parts.append(Text(f"last failure: {short_failure(str(view.snapshot.last_failure))}", "yellow"))
    if view.problem is not None:
        parts.append(Text(view.problem, "bold yellow"))
    config = view.config
    title = f"[bold]{config.name}[/] · handler {config.handler} · seed {config.seed} · {duration(view.elapsed_s)}"
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1))


def plain_line(view: View) -> str:
    """One frame as a line of text."""
    snapshot = view.snapshot
    parts = [f"[{duration(view.elapsed_s)}]"]
    if snapshot is None:
        parts.append("waiting for the first figures")
    else:
        last = last_reward(snapshot, view.config)
        lag = "-" if snapshot.lag_last is None else snapshot.lag_last
        waiting = " ".join(f"{stage}={counts.waiting}+{counts.working}" for stage, counts in snapshot.stages.items())
        parts += [
            f"version {_or_dash(snapshot.version_newest)}/{view.config.train.num_versions}",
            f"reward {last.mean_reward:.2f}" if last else "reward -",
            *([f"held out {evaluated(held_out)}"] if (held_out := last_evaluation(snapshot.evaluations)) else []),
            f"lag {lag}",
            f"waiting+working {waiting}",
            f"scored {snapshot.episodes[EpisodeState.SCORED]}",
            f"failed {snapshot.episodes[EpisodeState.FAILED]}",
            f"{_rate(view.rates.tokens_per_s)} tokens/s",
        ]
    restarts = sum(process.restarts for process in view.processes)
    if restarts:
        parts.append(f"restarts {restarts}")
    parts += _last_ends(view.processes)
    if snapshot is not None and snapshot.last_failure is not None:
        parts.append(f"last failure: {short_failure(str(snapshot.last_failure))}")
    if view.problem is not None:
        parts.append(f"! {view.problem}")
    return "  ".join(parts)


def _figures(view: View) -> Table:
    table = Table.grid(padding=(0, 2))
    # The third column gives way on a narrow terminal.
    table.add_column(style="dim", no_wrap=True, min_width=14)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(no_wrap=True, overflow="ellipsis")
    snapshot, num_versions = view.snapshot, view.config.train.num_versions
    if snapshot is None:
        table.add_row("policy version", "waiting for the first figures", "")
        return table
    done = snapshot.version_newest or 0
    eta = "" if view.rates.eta_s is None else f"  {duration(view.rates.eta_s)} to go"
    bar = Table.grid()
    bar.add_row(ProgressBar(total=num_versions, completed=done, width=SPARKLINE_WIDTH), Text(eta, "dim"))
    table.add_row("policy version", f"[bold]{_or_dash(snapshot.version_newest)}[/] of {num_versions}", bar)
    last = last_reward(snapshot, view.config)
    shown = [reward.mean_reward for reward in snapshot.rewards if last is not None and reward.version <= last.version]
    mean = f"[bold]{last.mean_reward:.2f}[/] at version {last.version}" if last else "-"
    table.add_row("mean reward", mean, Text(sparkline(shown, width=SPARKLINE_WIDTH), "green"))
    if snapshot.evaluations:
        table.add_row("held-out tasks", *_evaluation(snapshot.evaluations))
    bound = view.config.train.max_staleness
    table.add_row(
        "staleness",
        f"[bold]{_or_dash(snapshot.lag_last)}[/] in the last step",
        f"largest {_or_dash(snapshot.lag_max)}, bound {bound}; engines serve {_or_dash(snapshot.version_live)}",
    )
    table.add_row(
        "throughput",
        f"[bold]{_rate(view.rates.tokens_per_s)}[/] tokens/s",
        f"{_rate(view.rates.episodes_per_s)} episodes/s, {snapshot.tokens_sampled:,} tokens so far",
    )
    return table


def _evaluation(evaluations: Sequence[Evaluation]) -> tuple[str, str]:
    last, now = last_evaluation(evaluations), next((one for one in evaluations if not one.finished), None)
    mean = "-" if last is None else f"[bold]{evaluated(last)}[/] at version {last.version}"
    if now is None:
        return mean, ""
    return mean, f"version {now.version}: {now.episodes - now.under_way} of {now.episodes} episodes so far"


def _stages(snapshot: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim")
    for name in ("stage", "waiting", "working", "done"):
        table.add_column(name, justify="left" if name == "stage" else "right", min_width=7)
    for stage in Stage:
        counts = snapshot.stages[stage]
        table.add_row(stage.upper(), f"{counts.waiting:,}", f"{counts.working:,}", f"{counts.done:,}")
    return table


def _groups(snapshot: Snapshot) -> Text:
    groups = "  ".join(
        f"{state.lower()} {snapshot.groups[state]:,}"
        for state in GroupState
        if snapshot.groups[state] or state is not GroupState.EVALUATED
    )
    line = Text.assemble(("groups     ", "dim"), groups)
    for state in (EpisodeState.FAILED, EpisodeState.CANCELLED):
        if snapshot.episodes[state]:
            line.append(f"   {snapshot.episodes[state]:,} episodes {state.lower()}", "yellow")
    return line


def _processes(processes: Sequence[ProcessStatus]) -> Text:
    states = Counter(process.state for process in processes)
    line = Text.assemble(("processes  ", "dim"), f"{states[State.UP]} of {len(processes)} up")
    for process in processes:
        if process.state in (State.STARTING, State.WAITING):
            line.append(f"  {process.name} {process.state}", "yellow")
    restarted = [f"{process.name} {process.restarts}" for process in processes if process.restarts]
    line.append("   restarts " + (", ".join(restarted) or "0"), "yellow" if restarted else "")
    return line


def _last_ends(processes: Sequence[ProcessStatus]) -> list[str]:
    """Why processes were started again, or soon are: one line for each that ended."""
    return [f"{one.name} {short_failure(one.last_end)}" for one in processes if one.last_end is not None]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
