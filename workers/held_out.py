"""Evaluation's part of the feeder: held-out tasks, and the groups that evaluate a version on them; INIT is next.

Waits for: an engine that serves the version, for at most GIVE_UP_AFTER_S, and room among the run's evaluation episodes.
Where it stands is in Postgres alone, so a feeder that dies in the middle of an evaluation is followed by one that goes
on with it.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from pydantic import JsonValue
from sqlalchemy import Connection

from common.config import EvalConfig, RunConfig
from common.dataset import read_lines
from common.db import evaluations, groups, tasks
from common.db.episodes import Wakeup
from common.db.runs import Run
from common.errors import SetupError, boundary
from common.outcomes import Outcome
from workers.handlers.registry import load_handler

logger = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 600.0
"""An evaluation whose version no engine serves for so long would hold the engines up for ever: its files are lost."""
Tasks = Sequence[tuple[str, dict[str, JsonValue]]]
"""(key, payload) of each."""


class Evaluations:
    """What a feeder remembers of its runs' evaluations."""

    def __init__(self, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._give_up_after_s = give_up_after_s
        self._task_ids: dict[int, list[int]] = {}
        self._unserved_since: dict[int, tuple[int, float]] = {}
        """Run id -> the version that no engine serves, and since when, of time.monotonic."""

    def load_tasks(self, conn: Connection, run: Run, *, trained: Tasks, name: Callable[[str, Tasks], str]) -> None:
        """Store the run's held-out tasks, if it has an [eval]. Raises SetupError when they are others than before.

        `name` makes a data set's name, which no other tasks have, from a readable one and the tasks.
        """
        if run.config.eval is None:
            return
        given = held_out_tasks(run.config, run.config.eval, trained=trained)
        dataset = name(f"held-out:{run.config.eval.dataset or run.config.eval.seed}", given)
        if (before := evaluations.dataset_played(conn, run.id)) not in (None, dataset):
            raise SetupError(
                f"the held-out tasks of run {run.name} are not those that it was evaluated on before ({before}): "
                "put them back, or start a run of another name"
            )
        tasks.load(conn, dataset=dataset, handler=run.config.handler, payloads=given)
        self._task_ids[run.id] = tasks.ids(conn, dataset)
        logger.info("held-out tasks run=%s tasks=%d", run.name, len(given))

    def feed(self, conn: Connection, run: Run) -> list[Wakeup]:
        """Make the next groups of the run's evaluation, or end it; the messages to send after the commit.

        With the run's row locked. Groups are made in the order of the tasks, so their number says where it stands.
        """
        if run.config.eval is None:
            return []
        evaluations.settle_groups(conn, run.id)
        point, task_ids = evaluations.oldest_open(conn, run.id), self._task_ids[run.id]
        if point is None:
            return []
        if point.num_groups == len(task_ids) and point.num_in_flight == 0:
            evaluations.close(conn, run.id, point.version)
            logger.info("evaluated run=%s version=%d tasks=%d", run.name, point.version, len(task_ids))
            return []
        if not point.is_served:
            self._wait_for_engine(conn, run, point)
            return []
        self._unserved_since.pop(run.id, None)
        size = run.config.eval.samples_per_task
        room = (run.config.eval.max_episodes_in_flight - point.num_in_flight) // size
        chosen = task_ids[point.num_groups : point.num_groups + room]
        return groups.create(conn, run_id=run.id, task_ids=chosen, size=size, eval_version=point.version)

    def _wait_for_engine(self, conn: Connection, run: Run, point: evaluations.OpenPoint) -> None:
        """Its files may be lost: then no engine will ever have it. Episodes under way end by their own budgets."""
        version, since = self._unserved_since.setdefault(run.id, (point.version, time.monotonic()))
        if version != point.version:
            self._unserved_since[run.id] = (point.version, time.monotonic())
        elif point.num_in_flight == 0 and time.monotonic() - since >= self._give_up_after_s:
            error = f"no engine served version {version} for {self._give_up_after_s:g} s"
            evaluations.close(conn, run.id, version, error=error)
            logger.error("evaluation given up run=%s version=%d: %s", run.name, version, error)


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
