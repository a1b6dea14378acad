"""The feeder: `python -m workers.feeder`. Keeps each run's room full with new groups; INIT takes their episodes.

Waits for: room under the staleness bound, which a version makes when it is live on the engines. Looks again every
`feed_every_s`. Any number may run: the run's row is locked while one of them feeds it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from common.config import RunConfig
from common.db import engines, groups, runs, tasks
from common.db.episodes import Wakeup
from common.db.runs import DataCursor, Run
from common.db.session import Database
from common.errors import EpisodeError, SetupError, boundary
from common.outcomes import Outcome
from workers.app import app
from workers.handlers.registry import load_handler
from workers.publishing import publisher
from workers.render.of_run import renderer_of
from workers.service import serve

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""How often a run that cannot be fed is tried again."""


class Feeder:
    """Feeds every active run."""

    def __init__(
        self,
        database: Database,
        publish: Callable[[Sequence[Wakeup]], None],
        *,
        prove: Callable[[RunConfig], object] = lambda _: None,
    ) -> None:
        """`prove` raises SetupError for a run that could not be played, before any episode of it is made."""
        self._database = database
        self._publish = publish
        self._prove = prove
        self._task_ids: dict[int, list[int]] = {}
        self._troubles: dict[int, str | None] = {}
        self._look_again_at: dict[int, float] = {}

    def round(self) -> int:
        """Make as many groups as there is room for; returns how many. Raises DatabaseUnavailable.

        A run that cannot be fed says why in its row, and keeps no other from being fed.
        """
        with self._database.begin() as conn:
            active = runs.active(conn)
        return sum(self._feed(run) for run in active)

    def _feed(self, run: Run) -> int:
        if time.monotonic() < self._look_again_at.get(run.id, 0.0):
            return 0
        try:
            task_ids = self._tasks_of(run)
        except (SetupError, EpisodeError) as error:
            self._look_again_at[run.id] = time.monotonic() + LOOK_AGAIN_S
            self._say(run, str(error))
            return 0
        self._say(run, None)
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

    def _say(self, run: Run, trouble: str | None) -> None:
        if run.id in self._troubles and self._troubles[run.id] == trouble:
            return
        if trouble:
            logger.error("cannot feed run=%s: %s", run.name, trouble)
        with self._database.begin() as conn:
            runs.note_error(conn, run.id, trouble)
        self._troubles[run.id] = trouble

    def _tasks_of(self, run: Run) -> list[int]:
        if run.id not in self._task_ids:
            self._prove(run.config)
            given = list(read_tasks(run.config))
            dataset = dataset_of(run.config, given)
            with self._database.begin() as conn:
                if runs.bind_dataset(conn, run.id, dataset) != dataset:
                    raise SetupError(
                        f"data set {run.config.dataset_name} is not what run {run.name} began with: "
                        "put it back, or start a run of another name"
                    )
                added = tasks.load(conn, dataset=dataset, handler=run.config.handler, payloads=given)
                self._task_ids[run.id] = tasks.ids(conn, dataset)
            logger.info("tasks run=%s new=%d all=%d", run.name, added, len(self._task_ids[run.id]))
        return self._task_ids[run.id]


def dataset_of(config: RunConfig, given: Sequence[tuple[str, dict[str, JsonValue]]]) -> str:
    """Name of a task set that no other handler's and no other tasks can have."""
    content = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    return f"{config.dataset_name}:{config.handler}:{content[:16]}"


def read_tasks(config: RunConfig) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    """(key, payload) of each task: from the data set's JSON lines, or made by the handler.

    Raises SetupError that names the handler, or the file and the line; EpisodeError when the handler fails.
    """
    try:
        handler = load_handler(config.handler)
    except ValueError as error:
        raise SetupError(str(error)) from None
    if config.dataset is None:
        with boundary(Outcome.HANDLER_FAILED, f"tasks of {config.handler}"):
            made = list(handler.tasks(seed=config.seed, num_tasks=config.num_tasks))
        given = [(str(index), payload) for index, payload in enumerate(made)]
    else:
        given = list(_read_lines(config.dataset))
    if not given:
        raise SetupError(f"data set {config.dataset_name} has no tasks")
    yield from given


def _read_lines(dataset: Path) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    try:
        # Not splitlines(): a line separator of Unicode inside a string is no end of line in JSON lines.
        lines = dataset.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"data set {dataset} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                payload = json.loads(line)
            except ValueError as error:
                raise SetupError(f"data set {dataset} line {number} is not JSON: {error}") from None
            if not isinstance(payload, dict):
                raise SetupError(f"data set {dataset} line {number} is no JSON object: {line:.60}")
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
        lambda database, _: Feeder(database, publisher(app), prove=renderer_of).round,
        every_s=lambda given: given.feed_every_s,
    )


if __name__ == "__main__":
    sys.exit(main())
