"""Walls of bubblewrap around an episode's commands: own user, processes, network (none) and file system. No daemon.

In them the command server is the first process; with it the kernel ends all others. The folder stays as INIT made it:
what commands write lies over it, in memory of a fixed size, and goes with the server.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from common.config import SandboxKind
from common.config_network import NetworkConfig
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox import proxy_socket, seccomp
from workers.sandbox.cgroup import Group, Groups
from workers.sandbox.folder import AGENT_UID
from workers.sandbox.launching import (
    PATH,
    PYTHON_PATH,
    Remarks,
    memory_file,
    server_config,
    server_program,
    server_python,
)
from workers.sandbox.process import KILL_WAIT_S, Launched, start
from workers.sandbox.protocol import NO_NETWORK, Limits

PASSWD = b"root:x:0:0::/:/bin/false\nagent:x:1000:1000::/workspace:/bin/bash\n"
PROBE_TIMEOUT_S = 10.0
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
_STATE = "/.sandbox/state"
_SERVER = "/.sandbox/server"
_EVENTS = "/.sandbox/memory.events"

_DISK = """
set -e
mount -t tmpfs -o "size=$2,nr_inodes=$3,mode=0755,nosuid,nodev" sandbox /mnt
mkdir /mnt/base /mnt/upper /mnt/work /mnt/workspace /mnt/tmp /mnt/shm /mnt/state
mount --rbind "$1" /mnt/base
mount -t tmpfs -o size=4m,nr_inodes=64,mode=0700,nosuid,nodev sandbox /mnt/state
chown "$4" /mnt/upper /mnt/tmp /mnt/shm /mnt/state
mount -t overlay -o lowerdir=/mnt/base,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/workspace
shift 4
exec "$@"
"""
"""A disk of a fixed size, in a mount namespace that nobody else sees: the folder below, what commands write above it.

Bubblewrap's own file systems in memory have no limit to the number of files, each of which takes memory.
"""


class Bubblewrap:
    """One set of namespaces for a session's commands."""

    name: SandboxKind = "bubblewrap"

    def __init__(
        self, limits: Limits | None = None, network: NetworkConfig = NO_NETWORK, groups: Groups | None = None
    ) -> None:
        """`groups`: where each sandbox gets a control group; None = the server's own looks are its limits."""
        self.limits = limits or Limits()
        self.network = network
        self._groups = groups

    def joined(self, network: NetworkConfig) -> Bubblewrap:
        """The same with another network."""
        return Bubblewrap(self.limits, network, self._groups)

    def _group(self, handle: str) -> Group | None:
        if self._groups is None:
            return None
        try:
            return self._groups.make(handle, self.limits)
        except OSError as error:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"no control group can be made in {self._groups.folder}: {error.strerror}; see rollmill sandbox doctor",
            ) from error

    def launch(self, folder: Path) -> Launched:
        ours, theirs = socket.socketpair()
        status_fd, report_fd = os.pipe()
        status, remarks = _Status(status_fd), Remarks()
        with ExitStack() as undo, ExitStack() as stack, theirs:
            undo.callback(ours.close)
            stack.callback(os.close, report_fd)
            lent, lend_fd = self._lending(undo, stack)
            group = self._group(folder.name)
            if group is not None:
                undo.callback(group.end)
            fds = {
                "report": report_fd,
                "passwd": memory_file(stack, PASSWD),
                "server": memory_file(stack, server_program()),
            }
            if seccomp.is_known():
                fds["filter"] = memory_file(stack, seccomp.program(has_ip=self.network.mode != "none"))
            # By a file, since the agent can read the command line of the sandbox's first process.
            fds["options"] = memory_file(stack, "\0".join(_options(fds, self._environment(), group)).encode())
            bwrap = ("bwrap", "--args", str(fds["options"]), "--")
            process = start(
                [*_outside(folder, self.limits, group), *bwrap, *self._server(theirs, lend_fd)],
                env={"PATH": PATH},
                cwd=Path("/"),
                pass_fds=(*fds.values(), theirs.fileno(), *(() if lend_fd is None else (lend_fd,))),
                remarks_fd=remarks.fd,
            )
            undo.pop_all()
        return Launched(process=process, stream=ours, inner=status.inner, remarks=remarks.last, lent=lent, group=group)

    def _lending(self, undo: ExitStack, stack: ExitStack) -> tuple[socket.socket | None, int | None]:
        """Our end of the way by which the proxy's socket comes, and the number of theirs."""
        if self.network.mode != "proxy":
            return None, None
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        stack.callback(theirs.close)
        return ours, theirs.fileno()

    def _environment(self) -> dict[str, str]:
        own = {"PATH": PATH, "HOME": "/workspace", "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
        return own | (proxy_socket.ENVIRONMENT if self.network.mode == "proxy" else {})

    def _server(self, stream: socket.socket, lend_fd: int | None) -> tuple[str, ...]:
        # Counted in the sandbox's own user namespace, and so for it alone.
        most = self.limits.num_processes
        lend = None if lend_fd is None else (proxy_socket.PORT, lend_fd)
        config = server_config(
            self.limits, state_folder=_STATE, disks=("/workspace",), kernel_processes=most, lend=lend
        )
        return (server_python() or "python3", "-I", "-S", _SERVER, str(stream.fileno()), str(stream.fileno()), config)

    def trouble(self, folder: Path) -> str | None:
        """Why it can't be used here, tried in an empty folder; None = it can. Blocks."""
        if shutil.which("bwrap", path=PATH) is None:
            return "bubblewrap is not installed"
        if server_python() is None:
            return f"python3 is not installed in {PYTHON_PATH}"
        try:
            launched = self.launch(folder)
        except EpisodeError as error:
            return f"bubblewrap does not work here: {error.detail}"
        with launched.process as process, launched.stream as stream, ExitStack() as stack:
            if launched.group is not None:
                stack.callback(launched.group.end)
            stream.settimeout(PROBE_TIMEOUT_S)
            try:
                works = bool(stream.recv(1))
            except OSError:
                works = False
            stream.close()
            try:
                process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return None if works else f"bubblewrap does not work here: {launched.remarks() or 'it says nothing':.300}"


class _Status:
    """What bubblewrap reports about itself."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._reported = b""
        os.set_blocking(fd, False)

    def inner(self) -> int | None:
        """Number of the sandbox's first process, as the worker sees it; None = it is not known yet."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._fd, 1 << 12):
                self._reported += chunk
        for line in self._reported.splitlines(keepends=True):
            if line.endswith(b"\n") and "child-pid" in (status := json.loads(line)):
                return int(status["child-pid"])
        return None

    def __del__(self) -> None:
        os.close(self._fd)


def _outside(folder: Path, limits: Limits, group: Group | None) -> tuple[str, ...]:
    """The sandbox's disk, and an ordinary user before bubblewrap: root in it would own the system's files."""
    as_root = os.geteuid() == 0
    owner = f"{AGENT_UID}:{AGENT_UID}" if as_root else "0:0"
    unshare = ("unshare", *(() if as_root else ("--user", "--map-root-user")), "--mount", "--propagation=private")
    disk = ("sh", "-c", _DISK, "sh", str(folder), str(limits.disk_bytes), str(limits.num_inodes), owner)
    identity = ("setpriv", f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups") if as_root else ()
    enter = () if group is None else ("sh", "-c", 'echo 0 >"$0" && exec "$@"', str(group.entrance))
    return (*enter, *unshare, *disk, *identity)


def _options(fds: dict[str, int], environment: Mapping[str, str], group: Group | None) -> list[str]:
    return [
        *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--json-status-fd", str(fds["report"])),
        *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr", *_system()),
        *("--ro-bind-data", str(fds["passwd"]), "/etc/passwd", "--proc", "/proc", "--dev", "/dev"),
        # Some of it belongs to the sandbox's own namespaces, and with them to its commands.
        *("--ro-bind", "/proc/sys", "/proc/sys"),
        *("--bind", "/mnt/shm", "/dev/shm", "--remount-ro", "/dev", "--bind", "/mnt/tmp", "/tmp"),
        *("--bind", "/mnt/state", _STATE, "--ro-bind-data", str(fds["server"]), _SERVER),
        *(() if group is None else ("--ro-bind-try", str(group.events), _EVENTS)),
        *("--bind", "/mnt/workspace", "/workspace", "--chdir", "/workspace", "--remount-ro", "/"),
        "--clearenv",
        *(word for name, value in environment.items() for word in ("--setenv", name, value)),
        *(("--seccomp", str(fds["filter"])) if "filter" in fds else ()),
    ]


def _system() -> list[str]:
    """The parts of the system beside /usr that programs need."""
    options: list[str] = []
    for path in map(Path, _SYSTEM_LINKS):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for file in _SYSTEM_FILES:
        options += ["--ro-bind-try", file, file]
    return options
