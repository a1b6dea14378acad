"""One command of the command server: its output, its limits, its end."""

from __future__ import annotations

import os
import select
import signal
import time

from workers.sandbox.inside.frames import read_request
from workers.sandbox.inside.processes import Memory, ProcStat, killed_for_memory, reaped_cpu_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from workers.sandbox.command_server import Server

CHUNK_BYTES = 64 << 10
TICK_S = 0.05
"""How often a command's memory and processor time are looked at."""


class Command:
    """One command from its start to the end of its last process."""

    def __init__(self, server: Server, shell: int, output_fd: int, request: dict[str, Any]) -> None:
        self._server = server
        self._shell = shell
        self._fd = output_fd
        self._request = request
        self._deadline = time.monotonic() + request["timeout_s"]
        self._cpu_before_s = reaped_cpu_s() + sum(process.cpu_s for process in server.kept_processes())
        self._killed_before = killed_for_memory()
        self._memory = Memory()
        self._inodes_before = server.num_inodes()
        self._exit_code: int | None = None
        self._kept = bytearray()
        self._num_bytes = 0
        self._limit: str | None = None
        self._open = True
        os.set_blocking(output_fd, False)

    def run(self) -> tuple[dict[str, Any], bytes]:
        """The reply's header and output. Raises Gone, Stuck."""
        try:
            why = self._watch()
            if why == "memory":
                # What it holds could keep every later command from running.
                self._server.python.give_up()
        finally:
            self._server.end_processes(self._reaped)
        self._drain()
        if why is None and killed_for_memory() > self._killed_before:
            self._limit = "memory"
        limit = why if why is not None else (self._limit or self._server.full_disk())
        header = {
            "exit_code": None if why in ("time", "stopped") else 128 + signal.SIGKILL if why else self._exit_code,
            "limit": limit,
            "num_bytes": self._num_bytes,
        }
        return header, bytes(self._kept)

    def _watch(self) -> str | None:
        """Why the command has to be ended; None = it ended itself."""
        poller = select.poll()
        for fd in (self._fd, self._server.wakeup_fd, self._server.in_fd):
            poller.register(fd, select.POLLIN)
        self._begin(poller)
        next_look = time.monotonic() + TICK_S
        while True:
            self._server.reap(self._reaped)
            if self._exit_code is not None:
                if self._exit_code != 0:
                    self._note_processes(self._server.processes())
                return None
            now = time.monotonic()
            if now >= self._deadline:
                return "time"
            if now >= next_look:
                over = self._look()
                if over is not None:
                    return over
                next_look = time.monotonic() + TICK_S
            for fd, _ in poller.poll(1000 * max(0.0, min(next_look, self._deadline) - now)):
                if fd == self._server.in_fd:
                    read_request(fd)
                    return "stopped"
                if fd == self._server.wakeup_fd:
                    self._server.drain_wakeups()
                elif fd != self._fd:
                    self._serve(fd, poller)
                elif not self._read():
                    poller.unregister(fd)
            if self._num_bytes > self._request["written_bytes"]:
                return "output"

    def _begin(self, poller: select.poll) -> None:
        """Before the first wait."""

    def _serve(self, fd: int, poller: select.poll) -> None:
        """Something that `_begin` registered is ready."""

    def _reaped(self, pid: int, status: int) -> None:
        if pid == self._shell:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            self._exit_code = code

    def _read(self) -> bool:
        """Take one chunk; False when there is none now, or none will come."""
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        self._num_bytes += len(chunk)
        self._kept += chunk[: max(0, self._request["kept_bytes"] - len(self._kept))]
        self._open = bool(chunk)
        return self._open

    def _drain(self) -> None:
        """All writers are dead: what they wrote last is in the pipe."""
        while self._open and self._num_bytes <= self._request["written_bytes"]:
            before = self._num_bytes
            self._read()
            if self._num_bytes == before:
                return

    def _note_processes(self, processes: list[ProcStat]) -> None:
        # The server counts too, and the first to be refused a process have ended already.
        if sum(process.num_threads for process in processes) + 4 >= self._server.limits["num_processes"]:
            self._limit = "processes"

    def _look(self) -> str | None:
        """The limit of all its processes together that it is beyond."""
        processes = self._server.processes()
        self._note_processes(processes)
        cpu_s = sum(process.cpu_s for process in processes) + reaped_cpu_s() - self._cpu_before_s
        if cpu_s > self._server.limits["cpu_s"]:
            return "cpu"
        if self._server.has_too_many_files(self._inodes_before):
            return "disk"
        return "memory" if self._memory.is_over(processes, self._server.limits["memory_bytes"]) else None
