"""What every kind of sandbox offers: INIT creates one, RUN runs the agent's commands in it, the last one destroys it.

The agent's faults are data in `ExecResult`; the sandbox's own faults are EpisodeError(SANDBOX_FAILED).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.config import SandboxKind
from common.config_network import NetworkConfig
from common.episode import Frozen
from common.errors import RollmillError
from workers.sandbox.file_requests import FileRequest

NO_NETWORK = NetworkConfig()
DAY_S = 86_400.0
"""Nobody needs a sandbox for longer unless the run says so."""


class OutOfMemory(RollmillError):
    """The agent's commands ended its sandbox by using more memory than there is. Ends the play as `memory_limit`:
    were it the infrastructure's fault, an agent could throw a bad episode away.
    """


class Limit(StrEnum):
    """A limit that a command met. It says something about the agent and is told to it; the sandbox is well."""

    TIME = "time"
    """Its time was up; it was stopped."""
    OUTPUT = "output"
    """It wrote more than anybody reads; it was stopped."""
    MEMORY = "memory"
    """All its processes together used more memory than the sandbox may; they were stopped."""
    CPU = "cpu"
    """All its processes together used more processor time than a command may; they were stopped."""
    PROCESSES = "processes"
    """It had as many processes as the sandbox may have, and could start no more."""
    DISK = "disk"
    """When it ended, the sandbox could hold no more bytes, or no more files."""


class Interpreter(StrEnum):
    """What has become of a sandbox's Python interpreter, and so of the names of earlier calls."""

    KEPT = "kept"
    """It is there for the next call."""
    RESTARTED = "restarted"
    """The one of earlier calls had ended: this call ran in a new one, which is there for the next call."""
    ENDED = "ended"
    """It ended with this call, or had to be ended: the next call gets a new one."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a sandbox may use. Sizes are in bytes."""

    memory_bytes: int = 2 << 30
    """Of all processes together, looked at 20 times a second."""
    address_bytes: int = 4 << 30
    """Address space of one process: what it can take between two looks."""
    num_processes: int = 128
    """Of the whole sandbox, threads too."""
    cpu_s: int = 600
    """Processor time of one command, all its processes together."""
    cpus: float = 2.0
    """Processors that it may keep busy at once. Docker and Podman only: without a control group, commands are niced."""
    disk_bytes: int = 384 << 20
    """Everything that commands write: in the folder, /tmp and /dev/shm together. It lies in memory.

    Docker and Podman have one for each: the whole, a half, a quarter of it.
    """
    num_inodes: int = 100_000
    """Files and folders that commands make."""
    file_bytes: int = 256 << 20
    """One file."""
    num_files: int = 1024
    """Open files of one process."""
    kept_bytes: int = 64 << 10
    """Output of a command that is kept, from the beginning."""
    written_bytes: int = 64 << 20
    """Output that ends the command: reading it takes processor time from everybody else."""


class SandboxSpec(Frozen):
    """Which sandbox an episode gets. INIT fills in what the task and the run leave open, and stores it for RUN."""

    kind: SandboxKind | None = None
    """None = as the node's ROLLMILL_SANDBOX says."""
    image: str | None = None
    """Image of `docker`; None = the node's ROLLMILL_SANDBOX_IMAGE, and no image for the other kinds."""
    network: NetworkConfig = NO_NETWORK
    """What its commands reach."""
    lifetime_s: float = DAY_S
    """How long its processes may run."""
    endpoint: str | None = None
    """URL of the container engine, where RUN can use it from any node; None = the sandbox is bound to its node."""
    files: dict[str, str] | None = None
    """With an endpoint, the task's files by relative path; None = they lie on the node."""


OPEN = SandboxSpec()
"""All is left to the node."""


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
    limit: Limit | None = None
    """The limit that it met; None = none. That output was dropped is no such limit."""
    interpreter: Interpreter | None = None
    """Of a call of Python; None = a command or a file."""

    def __post_init__(self) -> None:
        if self.timed_out != (self.exit_code is None):
            raise ValueError(f"timed_out={self.timed_out} does not go with exit_code={self.exit_code}")

    @property
    def truncated(self) -> bool:
        """Whether `output` is only the beginning."""
        return self.num_dropped_bytes > 0


@dataclass(frozen=True, kw_only=True)
class ServerCall:
    """What the command server itself shall do: one of `workers.sandbox.inside.calls`."""

    name: str
    given: Mapping[str, object]
    """JSON."""
    timeout_s: float
    most_bytes: int
    """Of the answer: a server that sends more is lost."""


class SandboxSession(Protocol):
    """An episode's sandbox as a handler sees it.

    Files, the working folder and exported variables and functions last from command to command, processes do not.
    """

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        """Run a shell command where the last one stood, at first in the sandbox's folder, with no standard input.

        When it ends, or its time is up, every process that it started is gone. Commands of one session run one after
        the other; waiting for the one before is not part of its time. Raises EpisodeError when the sandbox, not the
        command, failed, and OutOfMemory when commands ended it so. Cancelling stops the command.
        """
        ...

    async def python(self, code: str, *, timeout_s: float) -> ExecResult:
        """Run Python code in the sandbox's interpreter, which starts with the first call, in the folder and with the
        exported variables that commands have then. Names, imports and threads last from call to call; threads stand
        still in between. The last expression's value is shown.

        Exit code 1 = it raised, which `output` shows. When its time is up, the code is interrupted; what does not end
        then within 2 s loses its interpreter. Otherwise as `exec`.
        """
        ...

    async def file(self, request: FileRequest) -> ExecResult:
        """View, write or replace. Exit code 0 = done, 1 = refused; `output` says so to the agent. As `exec`."""
        ...

    async def call(self, call: ServerCall) -> tuple[dict[str, object], bytes]:
        """What the command server answers: a header and bytes, neither to be trusted. Raises as `exec`.

        Not for handlers: `workers.evaluator` copies files in and out by it.
        """
        ...

    async def close(self) -> None:
        """End the session's processes. What commands changed goes with them; the files that INIT made stay."""
        ...


class Backend(Protocol):
    """Makes and removes sandboxes. All but the sessions' `exec` block: call them from a thread."""

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        """The same with nothing left open. Raises EpisodeError when it makes no sense, or this node can't do it."""
        ...

    def handle(self, episode_id: int, attempt: int) -> str:
        """The name that a sandbox of this attempt has, made or not."""
        ...

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        """Make the sandbox with these files (relative path -> text). `spec` as `choose` gave it.

        What an earlier try of the same attempt left behind is replaced. Raises EpisodeError.
        """
        ...

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        """The sandbox of this handle, with the spec it was created with, made by any process of this node.

        Raises EpisodeError if it is gone.
        """
        ...

    def destroy(self, handle: str) -> None:
        """Remove the sandbox and all it holds; does nothing if it is gone. Raises EpisodeError if it can't."""
        ...

    def sweep(self) -> None:
        """Remove what nobody owns any more and no handle leads to. Raises EpisodeError."""
        ...
