"""The feeder: `python -m workers.feeder`. Keeps each run's room full with new groups; INIT takes their episodes.

Waits for: room under the staleness bound, which a version makes when it is live on the engines. Looks again every
`feed_every_s`. Any number may run: the run's row is locked while one of them feeds it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from pydantic import JsonValue

from common.config import RunConfig
from common.db import engines, groups, runs, tasks
from common.db.episodes import Wakeup
from common.db.runs import DataCursor, Run
from common.db.session import Database
from common.errors import SetupError
from workers.app import app
from workers.handlers.registry import load_handler
from workers.publishing import publisher
from workers.service import serve

logger = logging.getLogger(__name__)


class Feeder:
    """Feeds every active run."""

    def __init__(self, database: Database, publish: Callable[[Sequence[Wakeup]], None]) -> None:
        self._database = database
        self._publish = publish
        self._task_ids: dict[int, list[int]] = {}

    def round(self) -> int:
        """Make as many groups as there is room for; returns how many. Raises DatabaseUnavailable."""
        with self._database.begin() as conn:
            active = runs.active(conn)
        return sum(self._feed(run) for run in active)

    def _feed(self, run: Run) -> int:
        task_ids = self._tasks_of(run)
        with self._database.begin() as conn:
            cursor = runs.lock_cursor(conn, run.id)
            live_version = engines.live_version(conn, run.id)
            if cursor is None or live_version is None:
                return 0
            room = min(
                run.config.groups_in_flight - groups.num_in_flight(conn, run.id, live_version=live_version),
                run.config.num_groups - groups.num_not_dropped(conn, run.id),
            )
            if room <= 0:
                return 0
            chosen, cursor = next_tasks(task_ids, cursor, num=room, seed=run.config.seed)
            wakeups = groups.create(conn, run_id=run.id, task_ids=chosen, size=run.config.rollout.group_size)
            runs.move_cursor(conn, run.id, cursor)
        logger.info("fed run=%s groups=%d live_version=%d", run.name, room, live_version)
        self._publish(wakeups)
        return room

    def _tasks_of(self, run: Run) -> list[int]:
        if run.id not in self._task_ids:
            with self._database.begin() as conn:
                added = tasks.load(
                    conn,
                    dataset=run.config.dataset_name,
                    handler=run.config.handler,
                    payloads=read_tasks(run.config),
                )
                self._task_ids[run.id] = tasks.ids(conn, run.config.dataset_name)
            if not self._task_ids[run.id]:
                raise SetupError(f"run {run.name}: data set {run.config.dataset_name} has no tasks")
            logger.info("tasks run=%s new=%d all=%d", run.name, added, len(self._task_ids[run.id]))
        return self._task_ids[run.id]


def read_tasks(config: RunConfig) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    """(key, payload) of each task: from the data set's JSON lines, or made by the handler.

    Raises SetupError that names the file and the line.
    """
    if config.dataset is None:
        made = load_handler(config.handler).tasks(seed=config.seed, num_tasks=config.num_tasks)
        yield from ((str(index), payload) for index, payload in enumerate(made))
        return
    try:
        # Not splitlines(): a line separator of Unicode inside a string is no end of line in JSON lines.
        lines = config.dataset.read_text().split("\n")
    except OSError as error:
        raise SetupError(f"data set {config.dataset} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                payload = json.loads(line)
            except ValueError as error:
                raise SetupError(f"data set {config.dataset} line {number} is not JSON: {error}") from None
            if not isinstance(payload, dict):
                raise SetupError(f"data set {config.dataset} line {number} is no JSON object: {line:.60}")
            yield str(payload.get("id", number)), payload


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
        lambda database, _: Feeder(database, publisher(app)).round,
        every_s=lambda given: given.feed_every_s,
    )


if __name__ == "__main__":
    sys.exit(main())
