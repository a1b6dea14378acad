"""When the supervisor gives up a process that keeps ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import EXIT_AWAY, EXIT_SETUP


@dataclass(frozen=True, kw_only=True)
class CrashPolicy:
    """When a process that keeps ending is given up.

    Times count from when it was ready: one that takes long to load has not lived by that. Where it has no check for it,
    as a trainer of any module, they count from its start; what fails in a step is counted by trainer.failures.
    """

    max_in_row: int = 5
    """This many ends in a row, each soon after the process was ready, stop everything."""
    max_setup_errors: int = 3
    """This many in a row with EXIT_SETUP, none after it lived for lived_s, stop everything: a person must mend what is
    wrong, and how long a process takes to find out says how busy the machine is."""
    soon_s: float = 10.0
    """A process that is killed later than this begins a new row."""
    failed_soon_s: float = 60.0
    """The same for one that ends by itself: on a busy machine it takes long to get anywhere."""
    lived_s: float = 600.0
    """The same for one that ends with EXIT_SETUP."""
    backoff_s: float = 0.25
    """Pause before the first restart; doubles with each crash of the row."""

    def is_soon(self, exit_code: int, lived_s: float) -> bool:
        """Whether an end goes on with the row."""
        if exit_code == EXIT_SETUP:
            return lived_s < self.lived_s
        return lived_s < (self.soon_s if exit_code < 0 else self.failed_soon_s)

    def is_enough(self, row: Sequence[int]) -> bool:
        """Whether the ends in a row, of these exit codes, stop everything. Who only waited in vain may go on to."""
        num_away = row.count(EXIT_AWAY)
        return row.count(EXIT_SETUP) >= self.max_setup_errors or len(row) - num_away >= self.max_in_row
