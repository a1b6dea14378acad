"""The reaper: `python -m workers.reaper`. Brings back episodes that stand still, ends those that came too late for
their group to be trained, removes sandboxes nobody needs.

Waits for: the next round. Safe to run many at once: rows that another reaper holds are skipped.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence

from common.db import episodes, late, nodes, retries, sandboxes
from common.db.episodes import Wakeup
from common.db.retries import Backoff
from common.db.session import Database
from common.errors import EpisodeError
from common.settings import Settings
from workers.app import app
from workers.node_watch import NodeWatch
from workers.publishing import publisher
from workers.sandbox import open_backend
from workers.sandbox.protocol import Backend
from workers.service import Round, serve

logger = logging.getLogger(__name__)

MANY = 1_000_000
"""More episodes than ever wait at once: the staleness bound holds them down."""


class Reaper:
    """One round does all five: expired leases, nodes that are gone, groups that are too old, lost messages, orphaned
    sandboxes."""

    def __init__(
        self, database: Database, given: Settings, backend: Backend, publish: Callable[[Sequence[Wakeup]], None]
    ) -> None:
        self._database = database
        self._settings = given
        self._backend = backend
        self._publish = publish
        self._watch = NodeWatch(given.node_lost_after_s)
        self._backoff = Backoff(first_s=given.retry_backoff_s, max_s=given.retry_backoff_max_s)

    def resend_all(self) -> None:
        """Announce every waiting episode at once: for a broker that starts empty."""
        with self._database.begin() as conn:
            waiting = episodes.resend(conn, after_s=0, limit=MANY)
        self._publish(waiting)

    def round(self) -> None:
        """One round. Raises DatabaseUnavailable; the next round does what this one did not."""
        with self._database.begin() as conn:
            expired = retries.reap(conn, max_attempts=self._settings.max_attempts, backoff=self._backoff)
        if expired:
            logger.warning("took back episodes=%d: their leases ran out", len(expired))
        moved = self._leave_lost_nodes()
        with self._database.begin() as conn:
            doomed = late.cancel_doomed(conn)
        if doomed is not None:
            logger.info("cancelled episodes=%d: their groups are too old to be trained", doomed.num_cancelled)
        with self._database.begin() as conn:
            lost = episodes.resend(conn, after_s=self._settings.resend_after_s)
        if lost:
            logger.info("announced again, or after their wait, episodes=%d", len(lost))
        self._publish([*expired, *moved, *lost])
        self._sweep()

    def _leave_lost_nodes(self) -> list[Wakeup]:
        given, moved = self._settings, []
        with self._database.begin() as conn:
            lost = self._watch.lost(nodes.silent(conn, silent_s=given.lease_s), time.monotonic())
        for node in lost:
            with self._database.begin() as conn:
                moved += retries.leave_node(
                    conn, node, silent_s=given.lease_s, max_attempts=given.max_attempts, backoff=self._backoff
                )
            logger.warning("lost node=%s: no RUN fleet there, episodes=%d start over elsewhere", node, lost[node])
        return moved

    def _sweep(self) -> None:
        with self._database.begin() as conn:
            orphans = sandboxes.orphans(conn, node=self._settings.node)
        gone = [orphan.id for orphan in orphans if self._destroy(orphan.handle)]
        if gone:
            with self._database.begin() as conn:
                sandboxes.destroyed(conn, gone)
        try:
            self._backend.sweep()
        except EpisodeError as error:
            logger.warning("orphaned sandboxes left for a later round %s", error)

    def _destroy(self, handle: str) -> bool:
        """One that cannot be removed must not keep the others, and leases that run out, waiting; it is tried again."""
        try:
            self._backend.destroy(handle)
        except EpisodeError as error:
            logger.warning("sandbox left for the next round handle=%s %s", handle, error)
            return False
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Reap until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m workers.reaper", description=__doc__)
    parser.add_argument(
        "--resend-all", action="store_true", help="announce every waiting episode at the start: the broker is empty"
    )
    resend_all: bool = parser.parse_args(argv).resend_all

    def start(database: Database, given: Settings) -> Round:
        reaper = Reaper(database, given, open_backend(given), publisher(app))
        if resend_all:
            reaper.resend_all()
        return reaper.round

    return serve("reaper", start, every_s=lambda given: given.reap_every_s)


if __name__ == "__main__":
    sys.exit(main())
