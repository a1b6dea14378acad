"""What every kind of sandbox offers: INIT creates one, RUN runs the agent's commands in it, the last one destroys it.

The agent's faults are data in `ExecResult`; the sandbox's own faults are EpisodeError(SANDBOX_FAILED).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What one command did."""

    exit_code: int | None
    """0 = success, 128 + n = ended by signal n; None = it was stopped because its time was up."""
    output: str
    """Standard output and error together, in the order written; bytes that are no UTF-8 become U+FFFD."""
    timed_out: bool
    num_dropped_bytes: int = 0
    """Output beyond the limit: counted, not kept."""

    def __post_init__(self) -> None:
        if self.timed_out != (self.exit_code is None):
            raise ValueError(f"timed_out={self.timed_out} does not go with exit_code={self.exit_code}")

    @property
    def truncated(self) -> bool:
        """Whether `output` is only the beginning."""
        return self.num_dropped_bytes > 0


class SandboxSession(Protocol):
    """An episode's sandbox as a handler sees it. Files last from command to command, processes do not."""

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run a shell command, in the sandbox's folder, with no standard input.

        When it ends, or its time is up, every process that it started is gone. Raises EpisodeError when the
        sandbox, not the command, failed. Cancelling stops the command.
        """
        ...


class Backend(Protocol):
    """Makes and removes sandboxes of one kind. All but the sessions' `exec` block: call them from a thread."""

    @property
    def name(self) -> str:
        """What is stored with a handle."""
        ...

    def handle(self, episode_id: int, attempt: int) -> str:
        """The name that a sandbox of this attempt has, made or not."""
        ...

    def create(self, handle: str, files: Mapping[str, str]) -> None:
        """Make the sandbox with these files (relative path -> text).

        What an earlier try of the same attempt left behind is replaced. Raises EpisodeError.
        """
        ...

    def attach(self, handle: str) -> SandboxSession:
        """The sandbox of this handle, made by any process of this node. Raises EpisodeError if it is gone."""
        ...

    def destroy(self, handle: str) -> None:
        """Remove the sandbox and all it holds; does nothing if it is gone. Raises EpisodeError if it can't."""
        ...
