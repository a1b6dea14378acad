"""The command server, which runs inside every sandbox: one shell per command, one command at a time, framed replies.

The sandbox's own Python runs it, as one text that `workers.sandbox.server_text` makes of this and of
`workers.sandbox.inside`. It is the first process of its process namespace, or else the one that adopts orphans: so it
finds every process of a command, however it left its group. `workers.sandbox.client` talks to it.

    python3 THE_TEXT IN_FD OUT_FD CONFIG

A request is a length (4 bytes, big endian) and JSON: a command, or a call of `workers.sandbox.inside.calls`. A reply is
two lengths, JSON and the command's output.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import sys
import time

from workers.sandbox.inside.calls import CALLS
from workers.sandbox.inside.command import Command
from workers.sandbox.inside.file_tools import FileTools
from workers.sandbox.inside.frames import Gone, Stuck, read_request, write_reply
from workers.sandbox.inside.kernel_limits import limit_resources
from workers.sandbox.inside.own_files import clear_folder, forgiving, write_file
from workers.sandbox.inside.processes import ProcStat, all_processes
from workers.sandbox.inside.python_tool import PythonTool

TYPE_CHECKING = False
"""Spelt out, since the import of `typing` would take a third of the time of a start."""
if TYPE_CHECKING:
    from typing import Any, NoReturn

SHELL = "/bin/bash"
MAX_ARGUMENT_BYTES = 100_000
"""The kernel takes at most 128 KiB in one argument; a longer command goes through a file."""
MAX_STATE_BYTES = 1 << 20
KILL_WAIT_S = 5.0
NICENESS = 5
"""So that commands do not keep the worker itself waiting."""
NO_SHELL = 126
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
WHOLE = b"\n#whole\n"
"""Ends a saved state that was written to its end."""

SAVE_STATE = (
    "{ set +xeu; } 2>/dev/null; { builtin pwd -P; builtin printf '\\0'; builtin export -p; builtin declare -f; "
    "builtin printf '\\n#whole\\n'; } 2>/dev/null >|%s"
)
"""Run as the shell ends, by built-in commands alone: it works where no process can be started any more."""


class Server:
    """Answers one request after the other."""

    def __init__(self, in_fd: int, out_fd: int, config: dict[str, Any]) -> None:
        self.in_fd = in_fd
        self.out_fd = out_fd
        self.limits: dict[str, int] = config["limits"]
        self._disks: list[str] = config["disks"]
        """Folders of the file systems that are the sandbox's own."""
        self._folder = config["state_folder"]
        """For the shells' files; cleared before each command."""
        self._has_namespace = os.getpid() == 1
        self._home = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        self._home_path = os.getcwd()
        self._cwd = self._home_path
        self._exports: bytes | None = None
        """None = as the server's own environment."""
        self.python = PythonTool(self)
        self.wakeup_fd, wake_fd = os.pipe()
        for fd in (self.wakeup_fd, wake_fd):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The first process of a namespace gets no signal that it has no handler for, and Python has one for this.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        libc = ctypes.CDLL(None)
        # Nobody in the sandbox may read or write the server's memory, or take its files.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> NoReturn:
        """Until the worker goes. Raises Gone, Stuck."""
        while True:
            request = read_request(self.in_fd)
            if "stop" in request:
                continue  # a stop that came after the command's end
            if "call" in request:
                header, output = CALLS[request["call"]](self, request["given"])
            else:
                header, output = self._run(request)
            header["id"] = request["id"]
            write_reply(self.out_fd, header, output)

    def _run(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        clear_folder(self._folder)
        if "python" in request:
            try:
                return self.python.run(request)
            except OSError as error:
                return _not_started(error)
        read_fd, write_fd = os.pipe()
        try:
            try:
                # Half of a surrogate pair is no text in any encoding.
                command = request.get("command", "").encode(errors="replace").replace(b"\0", b"?")
                arguments = self.prepare(command) if "command" in request else []
                shell = os.fork()
            except OSError as error:
                return _not_started(error)
            if shell == 0:
                if "file" in request:
                    self._become_file_tool(request["file"], write_fd)
                self.become_shell(arguments, write_fd)
            os.close(write_fd)
            write_fd = -1
            reply = Command(self, shell, read_fd, request).run()
        finally:
            os.close(read_fd)
            if write_fd != -1:
                os.close(write_fd)
        if reply[0]["limit"] not in ("time", "stopped"):
            self._take_state()
        return reply

    def prepare(self, command: bytes) -> list[bytes]:
        """The shell's arguments; writes the file that it reads at its start."""
        saved = self._path("end")
        start = b"unset -v BASH_ENV\n" + (self._exports or b"")
        start += b"\n{ builtin echo 1000 >/proc/$$/oom_score_adj; } 2>/dev/null\n"
        start += b"trap '" + (SAVE_STATE % saved).replace("'", "'\\''").encode() + b"' EXIT\n"
        if not self._can_enter(self._cwd):
            self._cwd = self._home_path
            start += b"builtin cd -P . 2>/dev/null\n"
        write_file(self._path("start"), start + b":\n")
        if len(command) <= MAX_ARGUMENT_BYTES:
            return [SHELL.encode(), b"-c", command]
        write_file(self._path("command"), command)
        return [SHELL.encode(), b"-c", b'. "$0"', self._path("command").encode()]

    def become_shell(self, arguments: list[bytes], output_fd: int) -> NoReturn:
        """In a forked child."""
        environment = dict(os.environ) if self._exports is None else {}
        environment["BASH_ENV"] = self._path("start")
        self.become(arguments, environment, cwd=self._cwd, fds=_without_input(output_fd))

    def become(
        self, arguments: list[Any], environment: dict[str, str], *, cwd: str, fds: tuple[int, int, int]
    ) -> NoReturn:
        """Turn this process, a fresh child, into a program of the agent's. `fds`: input, output, errors."""
        try:
            self._leave_server(fds)
            self._enter(cwd)
            os.execvpe(arguments[0], arguments, environment)
        except OSError as error:
            os.write(2, ("cannot start the command: %s\n" % error).encode())
        finally:
            os._exit(NO_SHELL)

    def _become_file_tool(self, request: dict[str, Any], output_fd: int) -> NoReturn:
        exit_code = NO_SHELL
        try:
            self._leave_server(_without_input(output_fd))
            exit_code, said = FileTools(self._home, self._home_path).answer(request)
            left = memoryview(said.encode(errors="replace"))
            while left:
                left = left[os.write(1, left) :]
        except (OSError, MemoryError) as error:
            os.write(2, ("cannot do that: %s\n" % error).encode())
        finally:
            os._exit(exit_code)

    def _leave_server(self, fds: tuple[int, int, int]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for place, fd in enumerate(fds):
            os.dup2(fd, place)
        os.nice(NICENESS)
        limit_resources(self.limits)

    def _enter(self, path: str) -> None:
        """Go to a folder. One below the first is reached from there: the way to that may be closed to the commands."""
        os.fchdir(self._home)
        if path != self._home_path:
            below = path.startswith(self._home_path.rstrip("/") + "/")
            os.chdir(path[len(self._home_path) :].lstrip("/") if below else path)

    def _can_enter(self, path: str) -> bool:
        try:
            self._enter(path)
        except (OSError, ValueError):
            return False
        finally:
            os.fchdir(self._home)
        return True

    def _take_state(self) -> None:
        """Where the shell stood and what it exported, if it came to say so. All of it is the agent's to write."""
        try:
            fd = os.open(self._path("end"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            data = file.read(MAX_STATE_BYTES + 1)
        cwd, _, exports = data.partition(b"\n\0")
        if len(data) > MAX_STATE_BYTES or not exports.endswith(WHOLE):
            return
        if cwd:
            self._cwd = os.fsdecode(cwd)
        self._exports = exports

    def path_below(self, name: str) -> str:
        """Where a path relative to the first folder is, for `become`: the server itself stands there."""
        return os.path.join(self._home_path, name)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def full_disk(self) -> str | None:
        """`disk` when the sandbox can hold no byte or no file more."""
        rooms = map(os.statvfs, self._disks)
        full = any(room.f_bfree == 0 or (room.f_files and room.f_ffree == 0) for room in rooms)
        return "disk" if full or self.has_too_many_files(0) else None

    def num_inodes(self) -> int:
        """Files of the sandbox where the kernel does not limit them; else 0."""
        if not self.limits["num_inodes"]:
            return 0
        return sum(room.f_files - room.f_ffree for room in map(os.statvfs, self._disks))

    def has_too_many_files(self, before: int) -> bool:
        """Whether there are more files than there may be, and more than before: it must be possible to remove some."""
        return self.num_inodes() > max(before, self.limits["num_inodes"])

    def processes(self) -> list[ProcStat]:
        """Those of the command."""
        found = all_processes()
        if self._has_namespace:
            return found
        ours = {os.getpid()}
        grown = True
        while grown:
            more = {process.pid for process in found if process.parent in ours} - ours
            ours |= more
            grown = bool(more)
        return [process for process in found if process.pid in ours]

    def kept_processes(self) -> list[ProcStat]:
        """Those that are there before a command starts."""
        return self.processes() if self.python.pid is not None else []

    def end_processes(self, reaped: Any) -> None:
        """Kill every process but the server and the interpreter, which stands still from here on. Raises Stuck."""
        deadline = time.monotonic() + KILL_WAIT_S
        self.python.stop()
        while not self._are_ended(reaped):
            self._kill_all()
            if self._are_ended(reaped):
                return
            if time.monotonic() > deadline:
                raise Stuck
            select.select([self.wakeup_fd], [], [], 0.01)
            self.drain_wakeups()

    def _are_ended(self, reaped: Any) -> bool:
        if self.reap(reaped):
            return True
        return self.python.pid is not None and all(found.pid == self.python.pid for found in self.processes())

    def _kill_all(self) -> None:
        if self._has_namespace and self.python.pid is not None:
            # None of those that stand still can fork, or wake another.
            forgiving(os.kill, -1, signal.SIGSTOP)
        elif self._has_namespace:
            # One call for all of them, during which none can fork: no bomb is faster.
            forgiving(os.kill, -1, signal.SIGKILL)
            return
        for process in self.processes():
            if process.pid != self.python.pid:
                forgiving(os.kill, process.pid, signal.SIGKILL)

    def reap(self, reaped: Any) -> bool:
        """Take leave of the dead; whether no process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            self.python.note_death(pid)
            reaped(pid, status)

    def drain_wakeups(self) -> None:
        """Forget the signals that have come."""
        try:
            while os.read(self.wakeup_fd, 4096):
                pass
        except BlockingIOError:
            pass


def _not_started(error: OSError) -> tuple[dict[str, Any], bytes]:
    said = ("cannot start the command: %s\n" % error.strerror).encode()
    limit = "disk" if error.errno == errno.ENOSPC else None
    return {"exit_code": NO_SHELL, "limit": limit, "num_bytes": len(said)}, said


def _without_input(output_fd: int) -> tuple[int, int, int]:
    return os.open("/dev/null", os.O_RDONLY), output_fd, output_fd


def lend_listener(port: int, way: int | str) -> None:
    """Hand the worker a socket on the sandbox's own loopback, on which its proxy answers. Raises OSError.

    `way`: to the worker, a file by number or a Unix socket by path; closed after it, so no way out is left.
    """
    import array
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        # The kernel holds what all sandboxes of this user have under way against the limit of whoever sends.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with socket.socket(socket.AF_UNIX) if isinstance(way, str) else socket.socket(fileno=way) as worker:
            if isinstance(way, str):
                worker.connect(way)
            worker.sendmsg(
                [b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]).tobytes())]
            )


def _go(*_: object) -> None:
    raise Gone


def main(arguments: list[str]) -> int:
    """Serve until the worker goes; then nothing is left of the sandbox's processes."""
    in_fd, out_fd, config = int(arguments[0]), int(arguments[1]), json.loads(arguments[2])
    for fd in {in_fd, out_fd}:
        os.set_inheritable(fd, False)
    if config.get("lend"):
        try:
            lend_listener(*config["lend"])
        except OSError as error:
            why = "is the engine on its machine?"
            if error.errno == errno.ETOOMANYREFS:
                why = "a sandbox of the same user has too many open files under way between its sockets:"
            sys.stderr.write("the worker's proxy is not in reach, %s %s\n" % (why, error))
            return 1
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (in_fd, out_fd):
            forgiving(os.close, int(name))
    own_folder = None
    if config["state_folder"] is None:
        import tempfile

        own_folder = config["state_folder"] = tempfile.mkdtemp(prefix="rollmill-")
    if not os.access(SHELL, os.X_OK):
        # Else each command would fail, as if it were the agent's fault.
        sys.stderr.write("there is no %s, which runs the commands: add it to the image, or install it\n" % SHELL)
        return 1
    server = Server(in_fd, out_fd, config)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if os.getpid() == 1 else _go)
    try:
        write_reply(out_fd, {"ready": True})
        server.serve()
    except Gone:
        return 0
    except Stuck:
        sys.stderr.write("a process of the command does not die\n")
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        server.python.give_up()
        server.end_processes(lambda *_: None)
        if own_folder is not None:
            clear_folder(own_folder)
            forgiving(os.rmdir, own_folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
