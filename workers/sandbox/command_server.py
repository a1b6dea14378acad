"""The command server, which runs inside every sandbox: one shell per command, one command at a time, framed replies.

One file, only the standard library, any Python from 3.8 on, since the sandbox's own Python runs it. It is the first
process of its process namespace, or else the one that adopts orphans: so it finds every process of a command, however
it left its group. `workers.sandbox.client` talks to it.

    python3 command_server.py IN_FD OUT_FD CONFIG

A request is a length (4 bytes, big endian) and JSON. A reply is two lengths, JSON and the command's output.
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
import struct
import sys
import time

TYPE_CHECKING = False
"""Spelt out, since the import of `typing` would take a third of the time of a start."""
if TYPE_CHECKING:
    from typing import Any, NoReturn

SHELL = "/bin/bash"
MAX_ARGUMENT_BYTES = 100_000
"""The kernel takes at most 128 KiB in one argument; a longer command goes through a file."""
MAX_STATE_BYTES = 1 << 20
CHUNK_BYTES = 64 << 10
TICK_S = 0.05
"""How often a command's memory and processor time are looked at."""
KILL_WAIT_S = 5.0
NICENESS = 5
"""So that commands do not keep the worker itself waiting."""
NO_SHELL = 126
OUT_OF_MEMORY = ("/.sandbox/memory.events", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
WHOLE = b"\n#whole\n"
"""Ends a saved state that was written to its end."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

SAVE_STATE = (
    "{ set +xeu; } 2>/dev/null; { builtin pwd -P; builtin printf '\\0'; builtin export -p; builtin declare -f; "
    "builtin printf '\\n#whole\\n'; } 2>/dev/null >|%s"
)
"""Run as the shell ends, by built-in commands alone: it works where no process can be started any more."""


class Gone(Exception):
    """The worker has gone, or tells the server to go."""


class Stuck(Exception):
    """A process does not die."""


def read_exactly(fd: int, num_bytes: int) -> bytes:
    """Raises Gone at the end of the stream."""
    data = b""
    while len(data) < num_bytes:
        try:
            chunk = os.read(fd, num_bytes - len(data))
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise Gone
        data += chunk
    return data


def read_request(fd: int) -> dict[str, Any]:
    """One request."""
    (length,) = struct.unpack(">I", read_exactly(fd, 4))
    request: dict[str, Any] = json.loads(read_exactly(fd, length))
    return request


def write_reply(fd: int, header: dict[str, Any], output: bytes = b"") -> None:
    """One reply. Raises Gone when nobody reads it."""
    head = json.dumps(header).encode()
    left = memoryview(struct.pack(">II", len(head), len(output)) + head + output)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as error:
        raise Gone from error


class ProcStat:
    """One process as /proc shows it."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when it is gone."""
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.is_zombie = fields[0] in (b"Z", b"X")
        self.parent = int(fields[1])
        self.cpu_s = sum(map(int, fields[11:15])) / _CLOCK_TICKS
        """Its own time and that of its children that have ended."""
        self.num_threads = int(fields[17])
        self.resident_bytes = int(fields[21]) * _PAGE_BYTES

    def unshared_bytes(self) -> int:
        """Memory that it has alone, and its part of what it shares; what maps files is not counted."""
        sizes: dict[bytes, int] = {}
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb") as file:
                for line in file:
                    words = line.split()
                    if words[0].startswith(b"Pss"):
                        sizes[words[0]] = int(words[1]) << 10
        except OSError:
            # A process may hide it. Then all of it counts.
            return self.resident_bytes
        return sizes.get(b"Pss:", 0) - sizes.get(b"Pss_File:", 0)


def all_processes() -> list[ProcStat]:
    """Every process but the server and the dead ones."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                process = ProcStat(int(name))
            except OSError:
                continue
            if not process.is_zombie:
                found.append(process)
    return found


class Command:
    """One command from its start to the end of its last process."""

    def __init__(self, server: Server, shell: int, output_fd: int, request: dict[str, Any]) -> None:
        self._server = server
        self._shell = shell
        self._fd = output_fd
        self._request = request
        self._deadline = time.monotonic() + request["timeout_s"]
        self._cpu_before_s = _reaped_cpu_s()
        self._killed_before = _killed_for_memory()
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
        finally:
            self._server.end_processes(self._reaped)
        self._drain()
        if why is None and _killed_for_memory() > self._killed_before:
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
                elif not self._read():
                    poller.unregister(self._fd)
            if self._num_bytes > self._request["written_bytes"]:
                return "output"

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
        cpu_s = sum(process.cpu_s for process in processes) + _reaped_cpu_s() - self._cpu_before_s
        if cpu_s > self._server.limits["cpu_s"]:
            return "cpu"
        if self._server.has_too_many_files(self._inodes_before):
            return "disk"
        most = self._server.limits["memory_bytes"]
        # Forked processes share pages, and each of them counts those as its own: ask for the parts, which is slow.
        over = sum(process.resident_bytes for process in processes) > most
        if over and sum(process.unshared_bytes() for process in processes) > most:
            return "memory"
        return None


def _killed_for_memory() -> int:
    """Processes that the kernel has ended at the limit of the sandbox's control group, where it sees one."""
    for name in OUT_OF_MEMORY:
        try:
            with open(name) as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except OSError:
            continue
    return 0


def _reaped_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
            if "command" not in request:
                continue  # a stop that came after the command's end
            header, output = self._run(request)
            header["id"] = request["id"]
            write_reply(self.out_fd, header, output)

    def _run(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        _clear(self._folder)
        # Half of a surrogate pair is no text in any encoding.
        command = request["command"].encode(errors="replace").replace(b"\0", b"?")
        read_fd, write_fd = os.pipe()
        try:
            try:
                arguments = self._prepare(command)
                shell = os.fork()
            except OSError as error:
                said = ("cannot start the command: %s\n" % error.strerror).encode()
                limit = "disk" if error.errno == errno.ENOSPC else None
                return {"exit_code": NO_SHELL, "limit": limit, "num_bytes": len(said)}, said
            if shell == 0:
                self._become_shell(arguments, write_fd)
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

    def _prepare(self, command: bytes) -> list[bytes]:
        """The shell's arguments; writes the file that it reads at its start."""
        saved = self._path("end")
        start = b"unset -v BASH_ENV\n" + (self._exports or b"")
        start += b"\n{ builtin echo 1000 >/proc/$$/oom_score_adj; } 2>/dev/null\n"
        start += b"trap '" + (SAVE_STATE % saved).replace("'", "'\\''").encode() + b"' EXIT\n"
        if not self._can_enter(self._cwd):
            self._cwd = self._home_path
            start += b"builtin cd -P . 2>/dev/null\n"
        _write(self._path("start"), start + b":\n")
        if len(command) <= MAX_ARGUMENT_BYTES:
            return [SHELL.encode(), b"-c", command]
        _write(self._path("command"), command)
        return [SHELL.encode(), b"-c", b'. "$0"', self._path("command").encode()]

    def _become_shell(self, arguments: list[bytes], output_fd: int) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            self._enter(self._cwd)
            os.nice(NICENESS)
            self._limit_resources()
            environment = dict(os.environ) if self._exports is None else {}
            environment["BASH_ENV"] = self._path("start")
            os.execve(SHELL, arguments, environment)
        except OSError as error:
            os.write(2, ("cannot start the command: %s\n" % error).encode())
        finally:
            os._exit(NO_SHELL)

    def _limit_resources(self) -> None:
        for name, limit in (
            (resource.RLIMIT_AS, self.limits["address_bytes"]),
            (resource.RLIMIT_FSIZE, self.limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, self.limits["num_files"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 64 << 10),
        ):
            try:
                resource.setrlimit(name, (limit, limit))
            except ValueError:
                # gVisor has neither such queues nor a way to limit them.
                if name != resource.RLIMIT_MSGQUEUE:
                    raise
        if self.limits["kernel_processes"]:
            limit = self.limits["kernel_processes"]
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

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

    def end_processes(self, reaped: Any) -> None:
        """Kill every process but the server. Raises Stuck."""
        deadline = time.monotonic() + KILL_WAIT_S
        while not self.reap(reaped):
            self._kill_all()
            if self.reap(reaped):
                return
            if time.monotonic() > deadline:
                raise Stuck
            select.select([self.wakeup_fd], [], [], 0.01)
            self.drain_wakeups()

    def _kill_all(self) -> None:
        if self._has_namespace:
            # One call for all of them, during which none can fork: no bomb is faster.
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            return
        for process in self.processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError:
                continue

    def reap(self, reaped: Any) -> bool:
        """Take leave of the dead; whether no process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            reaped(pid, status)

    def drain_wakeups(self) -> None:
        """Forget the signals that have come."""
        try:
            while os.read(self.wakeup_fd, 4096):
                pass
        except BlockingIOError:
            pass


def _clear(folder: str) -> None:
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            _forgiving(os.unlink, os.path.join(top, name))
        for name in folders:
            path = os.path.join(top, name)
            _forgiving(os.unlink if os.path.islink(path) else os.rmdir, path)


def _forgiving(remove: Any, path: str) -> None:
    try:
        remove(path)
    except OSError:
        pass


def _write(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(content)


def lend_listener(port: int, way: int | str) -> None:
    """Hand the worker a socket on the sandbox's own loopback, on which its proxy answers. Raises OSError.

    `way`: to the worker, a file by number or a Unix socket by path; closed after it, so no way out is left.
    """
    import array
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
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
            sys.stderr.write("the worker's proxy is not in reach, is the engine on its machine? %s\n" % error)
            return 1
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (in_fd, out_fd):
            _forgiving(os.close, int(name))  # type: ignore[arg-type]
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
        server.end_processes(lambda *_: None)
        if own_folder is not None:
            _clear(own_folder)
            _forgiving(os.rmdir, own_folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
