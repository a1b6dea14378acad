"""One supervised process: how it is described, started, signalled and reaped. The supervisor decides when."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from signal import Signals

from common.errors import SetupError
from deploy import child
from deploy.child import Identity

TAIL_LINES = 12
MAX_LINE_CHARS = 400
TAIL_BYTES = 32_768
READ_BYTES = 1 << 20


class Restart(StrEnum):
    """Whether a process that has ended is started again."""

    ALWAYS = "always"
    """A server or worker: it has no business to end."""
    ON_FAILURE = "on_failure"
    """It works something off; exit code 0 says that all is done."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """What to run, and how to treat it. Nothing secret belongs in argv: everybody may read it."""

    name: str
    """Unique in a supervisor; names the log file and the pid file."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's own environment."""
    ready: Callable[[], bool] | None = None
    """Asked until it says yes; must answer within about a second. None = ready as soon as it runs."""
    ready_timeout_s: float = 30.0
    lost_after_s: float | None = None
    """A process that was ready and has not said so again for this long is killed and started anew, though it may still
    run; None = it is believed. For programs that can hang in their own end."""
    restart: Restart = Restart.ALWAYS
    stop_signal: Signals = Signals.SIGTERM
    stop_timeout_s: float = 10.0
    """From stop_signal to SIGKILL."""
    death_signal: Signals = Signals.SIGKILL
    """What the process gets when the supervisor is killed."""
    identity: Identity = Identity.SAME
    causes: Mapping[str, str] = field(default_factory=dict)
    """Words in its log -> what they mean, to be told with an exit code that hides it."""


class Process:
    """A started process: leader of its own session, output appended to its log."""

    def __init__(self, spec: ProcessSpec, *, log_file: Path, mark: str) -> None:
        """Start it. `mark` is NAME=VALUE, put in its environment to know its offspring by."""
        self.spec = spec
        self.log_file = log_file
        self.started_at = time.monotonic()
        name, _, value = mark.partition("=")
        with log_file.open("ab") as log:
            log.write(_header(spec))
            log.flush()
            self._log_start = log.seek(0, os.SEEK_END)
            self._popen = subprocess.Popen(
                tied_argv(spec.argv, death_signal=spec.death_signal, identity=spec.identity),
                env={**os.environ, **spec.env, name: value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Also the id of its session and of its process group."""
        return self._popen.pid

    def exit_code(self) -> int | None:
        """None = it runs; negative = killed by that signal. What an ended process leaves in its group is killed."""
        if self._popen.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                # Before it is reaped: until then, its number cannot be the group of somebody else.
                self.kill_group()
                self._popen.wait()
        return self._popen.returncode

    def ask_to_stop(self) -> None:
        """Send the spec's stop signal, to the process alone: it knows how to stop its own children."""
        if self.exit_code() is None:
            self._popen.send_signal(self.spec.stop_signal)

    def kill_group(self) -> None:
        """SIGKILL the process and its group; nothing once it is reaped."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def explain_end(self, exit_code: int, *, killed_for: str | None = None) -> str:
        """How it ended, in words, with what its log says of the cause.

        `killed_for`: what it did to be killed by its supervisor; None = it was not.
        """
        if killed_for is None or exit_code != -signal.SIGKILL:
            return " ".join([explain_exit(exit_code), *self._causes()])
        return " ".join([killed_for, *self._causes()]) + ", and was killed"

    def _causes(self) -> list[str]:
        """What its log names, wherever: thousands of lines of tracebacks may follow."""
        causes = {words.encode(): cause for words, cause in self.spec.causes.items()}
        found: set[bytes] = set()
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            seen = b""
            while len(found) < len(causes) and (read := log.read(READ_BYTES)):
                # Words may begin at the end of what was read before.
                seen = seen[-max(map(len, causes)) :] + read
                found |= {words for words in causes if words in seen}
        return [cause for words, cause in causes.items() if words in found]

    def last_line(self) -> str | None:
        """The last line that it wrote since its start: where it ended with an error, that. None = it said nothing."""
        line = next((line.strip() for line in reversed(self._last_lines()) if line.strip()), None)
        return line and textwrap.shorten(line, MAX_LINE_CHARS, placeholder=" …")

    def log_tail(self) -> str:
        """The last lines that it wrote since its start, indented."""
        return "\n".join(f"    {line}" for line in self._last_lines()[-TAIL_LINES:])

    def _last_lines(self) -> list[str]:
        with self.log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()


def tied_argv(argv: Sequence[str], *, death_signal: Signals, identity: Identity) -> list[str]:
    """The command line that ties a program to this process's life and gives it its identity."""
    starter = [sys.executable, "-I", "-S", child.__file__]
    return [*starter, str(os.getpid()), str(int(death_signal)), identity, *argv]


def run_tool(
    argv: Sequence[str], *, log_file: Path, identity: Identity, stdin: str = "", timeout_s: float = 120.0
) -> None:
    """Run a program to its end, output to the log. Raises SetupError when it fails."""
    with log_file.open("ab") as log:
        try:
            done = subprocess.run(
                tied_argv(argv, death_signal=Signals.SIGKILL, identity=identity),
                input=stdin.encode(),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SetupError(f"{argv[0]} took longer than {timeout_s:.0f} s; its log: {log_file}") from None
    if done.returncode != 0:
        raise SetupError(f"{argv[0]} {explain_exit(done.returncode)}; its log: {log_file}")


def explain_exit(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code < 0:
        return f"was killed by {Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _header(spec: ProcessSpec) -> bytes:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"==== {now} start of {spec.name}: {' '.join(spec.argv)}\n".encode()
