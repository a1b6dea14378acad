"""The final report of a run: what the database knows of it, what the command knows of itself; JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.config import RunConfig
from common.db.examples import EXAMPLES, Answer, Example, run_example
from common.db.report import Summary, summary
from common.db.runs import Run
from common.db.session import Database
from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Wall time of the phases of one command."""

    setup: float | None
    """Installing, as told by the caller; None = not told."""
    start: float
    """Until all processes were up."""
    train: float
    """Until the run was finished."""
    stop: float | None
    """Until no process was left; None = they are still up."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a command knows of itself, beside what the database knows of the run."""

    seconds: Seconds
    resumed_from_version: int | None
    """Policy version at which the command went on with an earlier one's run; None = the run was new."""
    restarts: Mapping[str, int]
    """Restarts by process, of all processes."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run, as it went."""

    config: RunConfig
    summary: Summary
    answers: tuple[tuple[Example, Answer], ...]
    """To the questions that people ask."""
    session: Session | None
    """None = looked at later, by another command."""

    def stopped(self, stop_s: float) -> Report:
        """The same, once no process is left."""
        assert self.session is not None
        seconds = replace(self.session.seconds, stop=stop_s)
        return replace(self, session=replace(self.session, seconds=seconds))


def read_report(database: Database, run: Run, *, session: Session | None) -> Report:
    """Ask the database everything."""
    with database.begin() as conn:
        return Report(
            config=run.config,
            summary=summary(conn, run.id),
            answers=tuple((example, run_example(conn, example, run.name)) for example in EXAMPLES),
            session=session,
        )


def to_json(report: Report) -> dict[str, object]:
    """The report as a JSON document. Versions from which nothing was sampled, such as the last, have no reward."""
    rewards = {version: mean for version, mean in enumerate(report.summary.mean_reward_by_version) if mean is not None}
    document: dict[str, object] = {
        "run": report.config.name,
        "handler": report.config.handler,
        "seed": report.config.seed,
        "lag_bound": report.config.train.max_staleness,
        **asdict(report.summary),
        "sampled_versions": list(rewards),
        "mean_reward_by_version": list(rewards.values()),
    }
    if report.session is not None:
        document |= asdict(report.session)
    return document


def check_writable(path: Path) -> None:
    """Raise SetupError unless a report can be written there: found out before the run, not after."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise SetupError(f"report file {path} cannot be written: {error.strerror}") from None


def write_json(report: Report, path: Path) -> None:
    """Write the document, whole or not at all."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(to_json(report), indent=1) + "\n")
    aside.replace(path)
