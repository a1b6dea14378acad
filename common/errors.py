"""The error model.

SetupError: the person at the terminal can mend it; shown as one line. EpisodeError: this episode's attempt is
over, the process is fine. LeaseLost: somebody else works on the episode now; write nothing more. All else crashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.outcomes import Outcome


class RollmillError(Exception):
    """Root of the tree."""


class SetupError(RollmillError):
    """Something outside the program is missing or wrong. The message is one line that says what to do."""

    exit_code = 2
    """With which a process ends that says so."""


class UnreadableConfig(SetupError):
    """A run's stored configuration is not one of this release's. Its episodes wait; the other runs go on."""


class StillAway(SetupError):
    """What a process waited for did not come back in time. Nobody need mend the process: it may be started again."""

    exit_code = 75
    """As sysexits.h has it: try again later."""


EXIT_SETUP = SetupError.exit_code
EXIT_AWAY = StillAway.exit_code


class EpisodeError(RollmillError):
    """An attempt failed for a reason of infrastructure; the stage retries it while attempts last.

    `is_final` = another attempt would fail alike, so there is none.
    """

    def __init__(self, outcome: Outcome, detail: str, *, is_final: bool = False) -> None:
        assert not outcome.is_agent, f"{outcome} is an agent outcome, not an error"
        self.outcome = outcome
        self.detail = storable(detail)
        self.is_final = is_final
        super().__init__(f"{outcome}: {self.detail}")


class DatabaseUnavailable(RollmillError):
    """The database did not answer. Nothing was written; leases and the reaper bring the work back."""


class LeaseLost(RollmillError):
    """The claim on the episode is no longer ours: its token does not match, or the lease ran out."""


MAX_DETAIL_CHARS = 4000


def storable(message: str) -> str:
    """A handler's message as a text column takes it: no NUL, no half of a character, not endless."""
    clean = message.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
    return clean if len(clean) <= MAX_DETAIL_CHARS else f"{clean[:MAX_DETAIL_CHARS]} … ({len(clean)} characters)"


@contextmanager
def boundary(outcome: Outcome, what: str) -> Iterator[None]:
    """Attribute any error that escapes the block to `outcome`; errors of our own tree pass unchanged.

    So is a `sys.exit` of a handler, or of a library that it uses: it would end a thread of ours, and say nothing.
    """
    try:
        yield
    except RollmillError:
        raise
    except (Exception, SystemExit) as error:
        raise EpisodeError(outcome, f"{what}: {type(error).__name__}: {error}") from error
