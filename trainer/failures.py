"""What the trainer does when something fails: outlast what is away, note why a step failed."""

from __future__ import annotations

import logging
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from common.db import step_troubles
from common.db.run_lock import RunTaken
from common.db.session import Database
from common.db.steps import Step
from common.errors import DatabaseUnavailable, RollmillError, SetupError, StillAway
from common.weights import WeightsUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY_POLL_S = 1.0
MAX_ERROR_CHARS = 300
"""An error of the driver names all its parameters; the whole of it is in the log."""


class TeacherUnavailable(RollmillError):
    """The teacher's server did not answer. Nothing was trained."""


AWAY: dict[type[RollmillError], str] = {
    DatabaseUnavailable: "database",
    WeightsUnavailable: "weight store",
    TeacherUnavailable: "teacher",
}


def outlast_outage(action: Callable[[], T], *, stop: threading.Event, limit_s: float) -> T | None:
    """What `action` returns, called again while what it needs is away; None = `stop` was set meanwhile.

    The commit of a call that failed may have arrived: `action` must bear being done already. Waits for whichever is
    away, for `limit_s`; then raises StillAway.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return action()
        except tuple(AWAY) as error:
            what = next(name for kind, name in AWAY.items() if isinstance(error, kind))
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StillAway(
                    f"the {what} is away for {limit_s:.0f} s: {error}. Bring it back and start the trainer again; "
                    "it goes on from the last version, and replays a step that is open"
                ) from None
            logger.warning("%s away, trying for %.0f s more: %s", what, left_s, error)
        if stop.wait(min(AWAY_POLL_S, left_s)):
            return None


@contextmanager
def noting_failures(database: Database, step: Step) -> Iterator[None]:
    """Write an error of the block onto the step's row, for those who watch the run.

    It passes on, so that the trainer ends; one that came too often becomes a SetupError, as another start would end
    the same way. A SetupError is for a person to mend and is not counted; a database that is away is nothing to note,
    and the step of a run that is another trainer's is not ours to note anything of.
    """
    try:
        yield
    except (DatabaseUnavailable, RunTaken):
        raise
    except Exception as error:
        counts = not isinstance(error, SetupError)
        trouble = _note(database, step, _one_line(error), counts=counts)
        if not counts or trouble is None or not trouble.is_final:
            raise
        logger.exception("giving up run=%d step=%d version=%d", step.run_id, step.id, step.version_in)
        raise SetupError(f"{trouble}. Trying again ends the same way: mend the cause, or stop the run") from error


def _note(database: Database, step: Step, error: str, *, counts: bool) -> step_troubles.StepTrouble | None:
    """None = the database did not take it; the error itself is what matters then."""
    try:
        with database.begin() as conn:
            return step_troubles.note(conn, step, error, counts=counts)
    except DatabaseUnavailable as away:
        logger.warning("cannot note why step=%d failed: %s", step.id, away)
        return None


def _one_line(error: Exception) -> str:
    kind = "" if isinstance(error, SetupError) else f"{type(error).__name__}: "
    return textwrap.shorten(kind + str(error).replace("\0", "\ufffd"), MAX_ERROR_CHARS, placeholder=" …")
