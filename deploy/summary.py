"""The final report on the terminal: reward curve, figures, queries with their answers, and where to look further."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from common.db.evaluations import Evaluation
from common.db.report import Summary
from common.outcomes import Outcome
from common.settings import Settings
from deploy.curve import draw_in_terminal, held_out_points, write_png
from deploy.progress import evaluated, short_failure
from deploy.report import Report, Session, write_json
from deploy.tables import answer_table

CURVE_WIDTH = 80
MAX_ROWS = 8
NAME_WIDTH = 26
FIRST_VERSIONS, LAST_VERSIONS = 3, 5
"""Most versions that a mean reward is of; fewer in a short run."""


def present(report: Report, *, console: Console, data_dir: Path, json_file: Path | None) -> None:
    """Write the report's files and print it."""
    if json_file is not None:
        write_json(report, json_file)
    run, curve = report.config.name, report.summary.mean_reward_by_version
    picture = data_dir / "reports" / f"{run}.png"
    try:
        write_png(curve, picture, title=run, held_out=held_out_points(report.summary.evaluations))
        drawn = str(picture)
    except ImportError:
        drawn = "none: `pip install matplotlib` draws one"
    state = report.summary.state
    console.print()
    console.rule(f"[bold]{run}[/] is {state.lower()}", align="left")
    console.print(f"\nmean reward of each policy version's episodes\n{_drawn(curve, console)}\n", highlight=False)
    console.print(_grid(figures(report)))
    show_answers(console, report)
    console.print("\n[bold]Look further[/]")
    for name, value in ways_on(run, data_dir=data_dir, picture=drawn, json_file=json_file):
        # Not in a table: a path or command that is broken into lines cannot be copied. A long one has its own line,
        # where the terminal breaks it last.
        fits = NAME_WIDTH + len(value) <= console.width
        console.print(Text.assemble((f"{name:<{NAME_WIDTH}}", "dim"), "" if fits else "\n  ", value), soft_wrap=True)


def figures(report: Report) -> list[tuple[str, str]]:
    """(name, value) of each line of the table of figures; the value may hold markup."""
    config, summary = report.config, report.summary
    newest = summary.versions[-1] if summary.versions else 0
    handlers_own = {kind: num for kind, num in summary.failures.items() if kind == Outcome.HANDLER_FAILED}
    others = {kind: num for kind, num in summary.failures.items() if kind != Outcome.HANDLER_FAILED}
    rows = [
        ("policy versions", f"{newest} of {config.train.num_versions}" + _resumed(report.session)),
        ("mean reward", _rewards(summary.mean_reward_by_version)),
        ("episodes", _episodes(summary)),
        ("groups dropped", _counts({reason.replace("_", " "): num for reason, num in summary.groups_dropped.items()})),
        ("groups trained", _groups_trained(summary)),
        ("tokens sampled", f"{summary.tokens_sampled:,}"),
        ("trained unlike sampled", _must_be_zero(summary.token_mismatches, "episodes")),
        ("lost, trained twice", _must_be_zero(summary.episodes_lost + summary.episodes_trained_twice, "episodes")),
        ("staleness", _staleness(summary, config.train.max_staleness)),
        ("engine, trainer agree", _gap(summary.logprob_gap_max)),
        ("episodes ended by", _counts(summary.outcomes)),
        ("attempts", f"{summary.attempts:,} begun for {summary.episodes_total:,} episodes"),
        ("handler's own errors", _times(handlers_own)),
        ("infrastructure errors", _times(others)),
    ]
    if summary.evaluations:
        rows.insert(2, ("held-out tasks", _evaluated(summary.evaluations)))
    if summary.histories_rewritten:
        rows.append(("histories rewritten", f"{summary.histories_rewritten:,} times, each began a new training row"))
    if summary.episodes_left_out:
        rows.append(("left out of the loss", f"{summary.episodes_left_out:,} episodes, cut off for their length"))
    if summary.step_trouble is not None:
        rows.append(("training", f"[bold red]{escape(short_failure(str(summary.step_trouble)))}[/]"))
    if summary.last_failure is not None:
        rows.append(("last failure", escape(short_failure(str(summary.last_failure)))))
    if report.session is not None:
        seconds = report.session.seconds
        phases = ((name, getattr(seconds, name)) for name in ("setup", "start", "train", "stop"))
        rows += [
            ("process restarts", _counts({name: num for name, num in report.session.restarts.items() if num})),
            ("seconds", ", ".join(f"{name} {value:.1f}" for name, value in phases if value is not None)),
        ]
    return rows


def show_answers(console: Console, report: Report) -> None:
    """Print each question with its SQL, ready to be pasted, and the answer, shortened."""
    for example, answer in report.answers:
        console.print(f"\n[bold]{example.title}[/]")
        console.print(Text(example.for_run(report.config.name), "cyan"), soft_wrap=True)
        console.print(answer_table(answer, max_rows=MAX_ROWS))


def ways_on(run: str, *, data_dir: Path, picture: str, json_file: Path | None) -> list[tuple[str, str]]:
    """(what, where or by which command) for somebody who wants to see more."""
    rollmill = own_command(data_dir)
    ways = [
        ("the curve as a picture", picture),
        ("weights of each version", str(data_dir / "weights" / run)),
        ("logs of each process", str(data_dir / "logs")),
        ("this report again", f"{rollmill('report')} {run}"),
        ("SQL, read only", f'{rollmill("sql")} "SELECT * FROM reward_by_version"'),
        ("a Postgres shell", rollmill("psql")),
        ("stay up after a run", f"{rollmill('demo')} --keep-up"),
        ("Flower, beside it", rollmill("flower")),
    ]
    return ways if json_file is None else [("this report as JSON", str(json_file)), *ways]


def own_command(data_dir: Path) -> Callable[[str], str]:
    """How the person can call a subcommand of this program from where they are."""
    program = Path(sys.argv[0])
    on_path = shutil.which("rollmill")
    called = "rollmill" if on_path and Path(on_path).resolve() == program.resolve() else os.path.relpath(program)
    default = Settings.model_fields["data_dir"].default
    folder = "" if data_dir == Path(default).absolute() else f" --data-dir {shlex.quote(str(data_dir))}"
    return lambda subcommand: f"{called} {subcommand}{folder}"


def _drawn(curve: Sequence[float | None], console: Console) -> str:
    return draw_in_terminal(curve, width=min(console.width, CURVE_WIDTH)) or "no version has scored episodes"


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _resumed(session: Session | None) -> str:
    if session is None or session.resumed_from_version is None:
        return ""
    return f", went on from version {session.resumed_from_version}"


def _rewards(mean_reward_by_version: Sequence[float | None]) -> str:
    means = [mean for mean in mean_reward_by_version if mean is not None]
    if not means:
        return "-"
    if len(means) == 1:
        return f"[bold]{means[0]:.2f}[/] in the one version that has scored episodes"
    # No version is in both.
    first = means[: min(FIRST_VERSIONS, len(means) // 2)]
    last = means[len(first) :][-LAST_VERSIONS:]
    return (
        f"{sum(first) / len(first):.2f} in the first {f'{len(first)} versions' if len(first) > 1 else 'version'}, "
        f"[bold]{sum(last) / len(last):.2f}[/] in the last{f' {len(last)}' if len(last) > 1 else ''}"
    )


def _episodes(summary: Summary) -> str:
    fates = {
        "trained": summary.episodes_trained,
        "too stale": summary.episodes_stale,
        "in groups too small or uneven": summary.episodes_dropped_other,
        "in dropped groups without variance": summary.episodes_dropped_zero_variance,
        "never sampled": summary.episodes_untrainable,
        "failed": summary.episodes_failed,
        "cancelled": summary.episodes_cancelled - summary.episodes_stragglers,
        "cancelled as stragglers": summary.episodes_stragglers,
        "in flight": summary.episodes_in_flight,
        "lost": summary.episodes_lost,
    }
    return f"{summary.episodes_total:,}: " + _counts({name: num for name, num in fates.items() if num})


def _groups_trained(summary: Summary) -> str:
    even = summary.groups_trained_zero_variance
    if not even:
        return f"{summary.groups_trained:,}"
    text = f"{even:,} of them without variance"
    return f"{summary.groups_trained:,}, " + (f"[bold red]{text}[/]" if even == summary.groups_trained else text)


def _evaluated(evaluations: Sequence[Evaluation]) -> str:
    """The first and the last version that have a figure, and what is not in the figures."""
    known = [one for one in evaluations if one.mean_reward is not None]
    ends = [known[0], known[-1]] if len(known) > 1 else known
    parts = [f"{evaluated(one)} at version {one.version}" for one in ends]
    for name in ("failed", "mixed", "cancelled", "under_way"):
        if num := sum(getattr(one, name) for one in evaluations):
            parts.append(f"{num:,} episodes {name.replace('_', ' ')}, not counted")
    parts += [f"[bold red]version {one.version}: {escape(one.error)}[/]" for one in evaluations if one.error]
    return f"{len(evaluations)} evaluations: " + ", ".join(parts)


def _staleness(summary: Summary, bound: int) -> str:
    if summary.lag_max is None:
        return f"nothing trained, bound {bound}"
    return f"largest {summary.lag_max}, mean {summary.lag_mean:.2f} versions, bound {bound}"


def _gap(gap_max: float | None) -> str:
    return "-" if gap_max is None else f"log-probs differ by at most {gap_max:.1e} nats"


def _must_be_zero(count: int, what: str) -> str:
    return f"[green]0 {what}[/]" if count == 0 else f"[bold red]{count} {what}[/]"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num:,} {name}" for name, num in counts.items()) or "none"


def _times(counts: Mapping[str, int]) -> str:
    """An error is counted each time, however often it met the same episode."""
    return ", ".join(f"{num:,} time{'s' * (num != 1)} {name}" for name, num in counts.items()) or "none"
