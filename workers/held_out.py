"""Evaluation's part of the feeder: the held-out tasks, and how long it waits for engines with a version.

Where an evaluation stands is in Postgres alone (common/db/evaluations.py): a feeder that dies in the middle of one is
followed by one that goes on with it.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from common.config import EvalConfig, RunConfig
from common.dataset import read_lines
from common.db.evaluations import OpenPoint
from common.db.runs import Run
from common.errors import SetupError, boundary
from common.outcomes import Outcome
from workers.handlers.registry import load_handler

logger = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 600.0
"""An evaluation whose version no engine serves for so long would hold the engines up for ever: its files are lost."""
Tasks = Sequence[tuple[str, dict[str, JsonValue]]]
"""(key, payload) of each."""


class Patience:
    """How long a feeder waits for engines to serve the versions that are evaluated."""

    def __init__(self, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._give_up_after_s = give_up_after_s
        self._unserved_since: dict[int, tuple[int, float]] = {}
        """Run id -> the version that no engine serves, and since when, of time.monotonic."""

    def why_give_up(self, run: Run, point: OpenPoint) -> str | None:
        """Why the evaluation is to be given up; None = it is not. Episodes under way end by their own budgets."""
        if point.is_served or point.num_in_flight:
            self._unserved_since.pop(run.id, None)
            return None
        version, since = self._unserved_since.setdefault(run.id, (point.version, time.monotonic()))
        if version != point.version:
            self._unserved_since[run.id] = (point.version, time.monotonic())
        elif time.monotonic() - since >= self._give_up_after_s:
            logger.error("evaluation given up: no engine serves it run=%s version=%d", run.name, version)
            return f"no engine served version {version} for {self._give_up_after_s:g} s"
        return None


def held_out_tasks(config: RunConfig, given: EvalConfig, *, trained: Tasks) -> Tasks:
    """The tasks of the run's evaluations: none that is trained on as well.

    Raises SetupError when none is left, or the file cannot be read; EpisodeError when the handler fails.
    """
    known = {json.dumps(payload, sort_keys=True) for _, payload in trained}
    new = [task for task in _candidates(config, given) if json.dumps(task[1], sort_keys=True) not in known]
    if not new:
        source = given.dataset or f"handler {config.handler} with seed {given.seed}"
        raise SetupError(f"no held-out tasks: {source} gives none that is not trained on; see [eval]")
    return new[: given.num_tasks]


def _candidates(config: RunConfig, given: EvalConfig) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    if given.dataset is not None:
        yield from read_lines(given.dataset)
        return
    with boundary(Outcome.HANDLER_FAILED, f"tasks of {config.handler}"):
        # Twice as many as asked for: some of them may be trained on.
        made = list(itertools.islice(_handler_tasks(config, given), 2 * given.num_tasks))
    yield from ((str(index), payload) for index, payload in enumerate(made))


def _handler_tasks(config: RunConfig, given: EvalConfig) -> Iterator[dict[str, JsonValue]]:
    yield from load_handler(config.handler).tasks(seed=given.seed, num_tasks=2 * given.num_tasks)
