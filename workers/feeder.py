"""The feeder: `python -m workers.feeder`. Keeps each run's room full with new groups; INIT takes their episodes.

Waits for: room under the staleness bound, which a version makes when it is live on the engines, and room in the run's
share, which its own and the others' episodes make when they end. Looks again every `feed_every_s`. Any number may run:
the runs' rows are locked while one of them feeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from common.config import RunConfig
from common.dataset import read_lines
from common.db import evaluations, groups, runs, sharing, submissions, tasks
from common.db.episodes import Wakeup
from common.db.runs import DataCursor, Run
from common.db.session import Database
from common.errors import EpisodeError, SetupError, boundary
from common.outcomes import Outcome
from common.sharing import new_groups
from workers.app import app
from workers.handlers.base import Compacts
from workers.handlers.registry import load_handler
from workers.held_out import Patience, held_out_tasks
from workers.publishing import publisher
from workers.render.of_run import renderer_of
from workers.service import serve

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""How often a run that cannot be fed is tried again."""


@dataclass(frozen=True, kw_only=True)
class _Fed:
    """Groups that were made for a run."""

    run: Run
    wakeups: list[Wakeup]
    evaluates: bool

    @property
    def group_size(self) -> int:
        config = self.run.config
        return config.eval.samples_per_task if self.evaluates and config.eval else config.episodes_per_group


class Feeder:
    """Feeds every active run, each up to its share of what all may have in flight."""

    def __init__(
        self,
        database: Database,
        publish: Callable[[Sequence[Wakeup]], None],
        *,
        max_episodes_in_flight: int | None = None,
        prove: Callable[[RunConfig], object] = lambda _: None,
        patience: Patience | None = None,
    ) -> None:
        """`prove` raises SetupError for a run that could not be played, before any episode of it is made."""
        self._database = database
        self._publish = publish
        self._capacity = max_episodes_in_flight
        self._prove = prove
        self._patience = patience or Patience()
        self._held_out_ids: dict[int, list[int]] = {}
        """Run id -> its held-out tasks, of runs that are evaluated."""
        self._task_ids: dict[int, list[int]] = {}
        self._troubles: dict[int, str | None] = {}
        self._look_again_at: dict[int, float] = {}

    def round(self) -> int:
        """Make as many groups as there is room for; returns how many. Raises DatabaseUnavailable.

        A run that cannot be fed says why in its row, and keeps no other from being fed.
        """
        with self._database.begin() as conn:
            active = runs.active(conn)
        task_ids = {run.id: ids for run in active if (ids := self._look_up_tasks(run)) is not None}
        if not task_ids:
            return 0
        num_groups = 0
        for fed in self._feed(task_ids):
            num = len(fed.wakeups) // fed.group_size
            what = "to evaluate " if fed.evaluates else ""
            logger.info("fed %srun=%s groups=%d episodes=%d", what, fed.run.name, num, len(fed.wakeups))
            self._publish(fed.wakeups)
            num_groups += num
        return num_groups

    def _look_up_tasks(self, run: Run) -> list[int] | None:
        """Ids of the run's tasks; None = it cannot be fed now."""
        if time.monotonic() < self._look_again_at.get(run.id, 0.0):
            return None
        try:
            task_ids = self._tasks_of(run)
        except (SetupError, EpisodeError) as error:
            self._look_again_at[run.id] = time.monotonic() + LOOK_AGAIN_S
            self._say(run, str(error))
            return None
        self._say(run, None)
        return task_ids

    def _feed(self, task_ids: Mapping[int, list[int]]) -> list[_Fed]:
        """What each run gets: groups to evaluate versions first, as training takes what is left.

        All runs in one transaction: while it lasts no other feeder counts what is in flight, or both would fill it.
        Groups and cursor move together, so whenever a feeder dies, no task is skipped and none repeated.
        """
        fed = []
        with self._database.begin() as conn:
            cursors = {run_id: runs.lock_cursor(conn, run_id) for run_id in sorted(task_ids)}
            for run in (load.run for load in sharing.loads(conn)):
                if cursors.get(run.id) is None or not run.is_readable or run.id not in self._held_out_ids:
                    continue
                point, wakeups = evaluations.advance(conn, run, task_ids=self._held_out_ids[run.id])
                if point is not None and (error := self._patience.why_give_up(run, point)):
                    evaluations.close(conn, run.id, point.version, error=error)
                if wakeups:
                    fed.append(_Fed(run=run, wakeups=wakeups, evaluates=True))
            loads = sharing.loads(conn)
            demands = [sharing.demand(conn, load, fed=cursors.get(load.run.id) is not None) for load in loads]
            for load, num in zip(loads, new_groups(self._capacity, demands), strict=True):
                run, cursor = load.run, cursors.get(load.run.id)
                if not num or cursor is None:
                    continue
                submitted = submissions.take(conn, run.id, limit=num)
                chosen, cursor = next_tasks(task_ids[run.id], cursor, num=num - len(submitted), seed=run.config.seed)
                wakeups = groups.create(
                    conn,
                    run_id=run.id,
                    task_ids=[*submitted, *chosen],
                    size=run.config.episodes_per_group,
                    wanted=run.config.wanted,
                )
                runs.move_cursor(conn, run.id, cursor)
                fed.append(_Fed(run=run, wakeups=wakeups, evaluates=False))
        return fed

    def _say(self, run: Run, trouble: str | None) -> None:
        if run.id in self._troubles and self._troubles[run.id] == trouble:
            return
        if trouble:
            logger.error("cannot feed run=%s: %s", run.name, trouble)
        with self._database.begin() as conn:
            runs.note_error(conn, run.id, trouble)
        self._troubles[run.id] = trouble

    def _tasks_of(self, run: Run) -> list[int]:
        config = run.config
        if run.id not in self._task_ids:
            self._prove(config)
            given = read_tasks(config) if config.train.num_versions else []
            dataset = dataset_of(config, given)
            held_out = held_out_tasks(config, config.eval, trained=given) if config.eval else None
            with self._database.begin() as conn:
                if runs.bind_dataset(conn, run.id, dataset) != dataset:
                    raise SetupError(
                        f"data set {config.dataset_name} is not what run {run.name} began with: "
                        "put it back, or start a run of another name"
                    )
                added = tasks.load(conn, dataset=dataset, handler=config.handler, payloads=given)
                if held_out is not None:
                    self._held_out_ids[run.id] = evaluations.store_tasks(
                        conn, run, dataset=_dataset_name("held-out", config, held_out), given=held_out
                    )
                self._task_ids[run.id] = tasks.ids(conn, dataset)
            logger.info("tasks run=%s new=%d all=%d", run.name, added, len(self._task_ids[run.id]))
        return self._task_ids[run.id]


def dataset_of(config: RunConfig, given: Sequence[tuple[str, dict[str, JsonValue]]]) -> str:
    """Name of a task set that no other handler's and no other tasks can have."""
    return _dataset_name(config.dataset_name, config, given)


def _dataset_name(name: str, config: RunConfig, given: Sequence[tuple[str, dict[str, JsonValue]]]) -> str:
    content = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    return f"{name}:{config.handler}:{content[:16]}"


def read_tasks(config: RunConfig) -> list[tuple[str, dict[str, JsonValue]]]:
    """(key, payload) of each task: from the data set's JSON lines, or made by the handler.

    Raises SetupError that names the handler, or the file and the line; EpisodeError when the handler fails.
    """
    try:
        handler = load_handler(config.handler)
    except ValueError as error:
        raise SetupError(str(error)) from None
    if config.rollout.compact_tokens is not None and not isinstance(handler, Compacts):
        raise SetupError(f"rollout.compact_tokens is set, but handler {config.handler} has no method compact")
    if config.dataset is not None:
        return list(read_lines(config.dataset))
    with boundary(Outcome.HANDLER_FAILED, f"tasks of {config.handler}"):
        made = list(handler.tasks(seed=config.seed, num_tasks=config.num_tasks))
    if not made:
        raise SetupError(f"handler {config.handler} makes no tasks: name a data set in the run's configuration")
    return [(str(index), payload) for index, payload in enumerate(made)]


def next_tasks(task_ids: Sequence[int], cursor: DataCursor, *, num: int, seed: int) -> tuple[list[int], DataCursor]:
    """The next `num` tasks in the order that (seed, epoch) alone decides, and the cursor after them."""
    chosen: list[int] = []
    epoch, index = cursor.epoch, cursor.index
    while len(chosen) < num:
        order = list(task_ids)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        part = order[index : index + num - len(chosen)]
        chosen += part
        index += len(part)
        if index >= len(order):
            epoch, index = epoch + 1, 0
    return chosen, DataCursor(epoch=epoch, index=index)


def main(argv: Sequence[str] | None = None) -> int:
    """Feed until SIGTERM."""
    argparse.ArgumentParser(prog="python -m workers.feeder", description=__doc__).parse_args(argv)
    return serve(
        "feeder",
        lambda database, given: (
            Feeder(
                database, publisher(app), max_episodes_in_flight=given.max_episodes_in_flight, prove=renderer_of
            ).round
        ),
        every_s=lambda given: given.feed_every_s,
    )


if __name__ == "__main__":
    sys.exit(main())
