"""Training steps that fail: the trainer notes why on the step's row, and whoever watches the run reads it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from common.db.steps import Step

MAX_FAILURES = 3
"""So often a step is tried: the same groups and weights fail the same way."""
MAX_QUIET_REPLAYS = 3
"""So often a trainer may end in a step without a word before it is shown: one that is killed once is nothing."""


@dataclass(frozen=True, kw_only=True)
class StepTrouble:
    """Why a step is not done."""

    version_in: int
    """The version that it trains."""
    error: str
    """The latest error, on one line."""
    failures: int
    """Times that it failed; 0 = only for something outside that a person can mend, such as a full disk."""

    def __str__(self) -> str:
        times = f" {self.failures} time{'s' * (self.failures != 1)}" if self.failures else ""
        return f"training step from version {self.version_in} failed{times}: {self.error}"

    @property
    def is_final(self) -> bool:
        """Whether trying again is no use."""
        return self.failures >= MAX_FAILURES


def note(conn: Connection, step: Step, error: str, *, counts: bool) -> StepTrouble:
    """Say on the step's row why it failed. `counts` = trying again would change nothing."""
    failures = conn.execute(
        text("UPDATE train_step SET error = :error, failures = failures + :more WHERE id = :id RETURNING failures"),
        {"id": step.id, "error": error, "more": int(counts)},
    ).scalar_one()
    return StepTrouble(version_in=step.version_in, error=error, failures=failures)


def count_replay(conn: Connection, step: Step) -> int:
    """A trainer has found the step OPEN; how often that is by now."""
    replays: int = conn.execute(
        text("UPDATE train_step SET replays = replays + 1 WHERE id = :id RETURNING replays"), {"id": step.id}
    ).scalar_one()
    return replays


def forget(conn: Connection, run_id: int) -> None:
    """Let the open step be tried as often as a new one: somebody starts the run again, and may have mended it."""
    conn.execute(
        text("UPDATE train_step SET error = NULL, failures = 0, replays = 0 WHERE run_id = :run_id AND state = 'OPEN'"),
        {"run_id": run_id},
    )


def find(conn: Connection, run_id: int) -> StepTrouble | None:
    """How the step that is open, or was when the run was stopped, failed; None = it did not."""
    row = conn.execute(
        text(
            """
            SELECT version_in, error, failures, replays FROM train_step
             WHERE run_id = :run_id AND state IN ('OPEN', 'DROPPED') AND (error IS NOT NULL OR replays >= :many)
            """
        ),
        {"run_id": run_id, "many": MAX_QUIET_REPLAYS},
    ).first()
    if row is None:
        return None
    return StepTrouble(version_in=row.version_in, error=row.error or _killed(row.replays), failures=row.failures)


def _killed(replays: int) -> str:
    return (
        f"the trainer ended in it {replays} times without a word, as one does that is killed, say for its memory, "
        "which train.max_positions and train.max_logits bound"
    )
