"""The agent's Python interpreter: kept from call to call, stopped in between, and replaced when it is gone.

It is spared when the processes of a command are ended, but stands still until the next call: nothing runs in a sandbox
while no command or call does. The program is `workers.sandbox.inside.interpreter`.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time

from workers.sandbox.inside.command import Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from workers.sandbox.command_server import Server

    INTERPRETER = ""
    """The program's text, which `workers.sandbox.server_text` puts in."""

INTERRUPT_WAIT_S = 2.0
"""For code whose time is up to take its interrupt and leave the names as they are."""
ANSWER = struct.Struct(">IB")
RAISED, SUCCEEDED, BEGUN = 0, 1, 2
RUN_INTERPRETER = b'builtin exec python3 -u -c "$1" "$2" "$3"'


class PythonTool:
    """The interpreter, which there may not be now."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.pid: int | None = None
        self.had_calls = False
        """Whether there is, or was, something to lose."""
        self.num_calls = 0
        self.output_fd = self.calls_fd = self.answers_fd = -1

    def run(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """One call: the reply's header and output. Raises Gone, Stuck, and OSError when nothing can be started."""
        self._server.reap(lambda *_: None)  # it may have ended since the last command
        is_restarted = self.pid is None and self.had_calls
        call, (header, output) = self._call(request)
        if not call.has_begun and header["limit"] is None and self.had_calls and not is_restarted:
            # An earlier command had killed it, and it was not quite dead yet.
            is_restarted = True
            call, (header, output) = self._call(request)
        self.had_calls = True
        state = "ended" if self.pid is None else "restarted" if is_restarted else "kept"
        return dict(header, interpreter=state), output

    def _call(self, request: dict[str, Any]) -> tuple[PythonCall, tuple[dict[str, Any], bytes]]:
        if self.pid is None:
            self._start()
        self.num_calls += 1
        call = PythonCall(self._server, self, request)
        return call, call.run()

    def _start(self) -> None:
        """In the folder and with the exports that commands have now."""
        for fd in (self.output_fd, self.calls_fd, self.answers_fd):
            if fd != -1:
                os.close(fd)
        self.output_fd, output = os.pipe()
        calls, self.calls_fd = os.pipe()
        self.answers_fd, answers = os.pipe()
        try:
            arguments = self._server.prepare(RUN_INTERPRETER)
            arguments += [b"sh", INTERPRETER.encode(), str(calls).encode(), str(answers).encode()]
            pid = os.fork()
            if pid == 0:
                for fd in (calls, answers):
                    os.set_inheritable(fd, True)
                self._server.become_shell(arguments, output)
            self.pid = pid
        finally:
            for fd in (output, calls, answers):
                os.close(fd)
        for fd in (self.calls_fd, self.answers_fd):
            os.set_blocking(fd, False)

    def note_death(self, pid: int) -> None:
        """A process has been reaped."""
        if pid == self.pid:
            self.pid = None

    def give_up(self) -> None:
        """It is no longer spared."""
        if self.pid is not None:
            _signal(self.pid, signal.SIGKILL)
        self.pid = None

    def stop(self) -> None:
        """Until the next call."""
        if self.pid is not None:
            _signal(self.pid, signal.SIGSTOP)


class PythonCall(Command):
    """Some code in the interpreter. Exit code 0, or 1 when it raised; that of the interpreter if it ended."""

    def __init__(self, server: Server, tool: PythonTool, request: dict[str, Any]) -> None:
        assert tool.pid is not None
        super().__init__(server, tool.pid, tool.output_fd, request)
        self._tool = tool
        self.has_begun = False
        code = request["python"].encode("utf-8", "replace")
        self._unsent = memoryview(struct.pack(">II", tool.num_calls, len(code)) + code)

    def _begin(self, poller: select.poll) -> None:
        poller.register(self._tool.answers_fd, select.POLLIN)
        poller.register(self._tool.calls_fd, select.POLLOUT)
        assert self._tool.pid is not None
        _signal(self._tool.pid, signal.SIGCONT)

    def _serve(self, fd: int, poller: select.poll) -> None:
        try:
            if fd == self._tool.answers_fd:
                answer = os.read(fd, 4096)
                self._take_answer(answer)
                if not answer:
                    poller.unregister(fd)
                return
            self._unsent = self._unsent[os.write(fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = self._unsent[:0]  # it has ended, which is seen by its number
        if not self._unsent:
            poller.unregister(fd)

    def _take_answer(self, answer: bytes) -> None:
        expected = self._tool.num_calls
        while answer:
            number, what = ANSWER.unpack(answer[: ANSWER.size]) if len(answer) >= ANSWER.size else (0, 0)
            answer = answer[ANSWER.size :]
            if number != expected or what not in (RAISED, SUCCEEDED, BEGUN):
                # The code wrote there itself: what is to come can't be told apart from it any more.
                self._tool.give_up()
                return
            if what == BEGUN:
                self.has_begun = True
            else:
                self._exit_code = 1 - what

    def _watch(self) -> str | None:
        why = super()._watch()
        if why is not None and not (why in ("time", "output") and self._interrupt()):
            self._tool.give_up()
        return why

    def _interrupt(self) -> bool:
        """Whether the code took it, and the interpreter is there for the next call."""
        if self._unsent or self._tool.pid is None:
            return False
        _signal(self._tool.pid, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_WAIT_S
        poller = select.poll()
        for fd in (self._fd, self._server.wakeup_fd, self._tool.answers_fd):
            poller.register(fd, select.POLLIN)
        while self._exit_code is None and time.monotonic() < deadline:
            for fd, _ in poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                if fd == self._server.wakeup_fd:
                    self._server.drain_wakeups()
                elif fd == self._tool.answers_fd:
                    self._serve(fd, poller)
                elif not self._read():
                    poller.unregister(fd)
            self._server.reap(self._reaped)
            if self._tool.pid is None:
                return False
        return self._exit_code is not None


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
