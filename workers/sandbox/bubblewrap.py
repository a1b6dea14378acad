"""Walls of bubblewrap around each command: its own user, processes, network (none) and file system. No daemon.

Holes that this version leaves open: the folder's size on disk, the sum of the processes' memory, and system calls,
which no filter narrows down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox.folder import AGENT_UID
from workers.sandbox.process import KILLED, run_process
from workers.sandbox.protocol import ExecResult

LIMITS = (
    "--nproc=128:128",
    "--as=2147483648:2147483648",
    "--fsize=268435456:268435456",
    "--nofile=1024:1024",
    "--core=0:0",
)
"""Of each process, in bytes where it is a size; processes are counted for the whole sandbox."""
TMP_BYTES = 128 << 20
SHM_BYTES = 64 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSWD = b"root:x:0:0::/:/bin/false\nagent:x:1000:1000::/workspace:/bin/bash\n"
PROBE_TIMEOUT_S = 10.0
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
_STAGE = "/mnt"
"""Where a root worker shows the folder to bubblewrap, in a mount namespace of that command alone."""

_INIT = ("/bin/sh", "-c", 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?', "init")
"""The sandbox's first process. When it ends the kernel has ended all others, and bubblewrap, its parent, reaps it;
bubblewrap's own first process would be left to the machine's. It keeps its remarks on signals to itself."""


class Bubblewrap:
    """Every command gets a new set of namespaces; only the folder, at /workspace, outlives it."""

    name = "bubblewrap"

    async def run(self, folder: Path, command: str, *, timeout_s: float) -> ExecResult:
        with _launch(folder, command) as launch:
            ended = await run_process(
                launch.argv,
                timeout_s=timeout_s,
                env={"PATH": PATH},
                cwd=Path("/"),
                pass_fds=launch.fds,
                inner=lambda: launch.status().get("child-pid"),
            )
            exit_code = launch.status().get("exit-code")
        if ended.timed_out:
            exit_code = None
        elif exit_code is None and ended.killed_for_output:
            exit_code = KILLED
        elif exit_code is None:
            reason = ended.output.strip().rpartition("\n")[2]
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"bubblewrap ended with {ended.returncode}: {reason:.300}")
        return ExecResult(
            exit_code=exit_code,
            output=ended.output,
            timed_out=ended.timed_out,
            num_dropped_bytes=ended.num_dropped_bytes,
        )

    def trouble(self, folder: Path) -> str | None:
        """Why it can't be used here, tried in an empty folder; None = it can."""
        if shutil.which("bwrap", path=PATH) is None:
            return "bubblewrap is not installed"
        with _launch(folder, "echo works") as launch:
            try:
                done = subprocess.run(
                    launch.argv,
                    env={"PATH": PATH},
                    pass_fds=launch.fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=PROBE_TIMEOUT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"bubblewrap does not work here: {error}"
        said = done.stdout.decode(errors="replace").strip()
        return None if (done.returncode, said) == (0, "works") else f"bubblewrap does not work here: {said:.300}"


class _Launch:
    """A command line and the files that it reads and writes by number."""

    def __init__(self, argv: Sequence[str], *, fds: tuple[int, ...], status_fd: int) -> None:
        self.argv = argv
        self.fds = fds
        self._status_fd = status_fd
        self._reported = b""
        os.set_blocking(status_fd, False)

    def status(self) -> dict[str, int]:
        """What bubblewrap has reported so far: `child-pid`, and `exit-code` once the command has come to its end."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._status_fd, 1 << 12):
                self._reported += chunk
        status: dict[str, int] = {}
        for line in self._reported.splitlines(keepends=True):
            if line.endswith(b"\n"):
                status |= json.loads(line)
        return status


@contextmanager
def _launch(folder: Path, command: str) -> Iterator[_Launch]:
    with ExitStack() as stack:
        status_fd, report_fd = os.pipe()
        stack.callback(os.close, status_fd)
        stack.callback(os.close, report_fd)
        passwd_fd = _memory_file(stack, PASSWD)
        as_root = os.geteuid() == 0
        options = _options(_STAGE if as_root else str(folder), passwd_fd=passwd_fd, report_fd=report_fd)
        # By a file, since the agent can read the command line of the sandbox's first process.
        options_fd = _memory_file(stack, "\0".join(options).encode())
        argv = [
            *(_as_agent(folder) if as_root else ()),
            *("bwrap", "--args", str(options_fd), "--", *_INIT, "prlimit", *LIMITS, "--", "/bin/bash", "-c", command),
        ]
        yield _Launch(argv, fds=(passwd_fd, options_fd, report_fd), status_fd=status_fd)


def _memory_file(stack: ExitStack, content: bytes) -> int:
    handle = os.memfd_create("sandbox")
    stack.callback(os.close, handle)
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _as_agent(folder: Path) -> tuple[str, ...]:
    """Become an ordinary user before bubblewrap: root in it would own the system's files, whatever it is called.

    That user may not be able to reach the folder by its path, so the folder is shown to it elsewhere.
    """
    identity = (f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups")
    script = f'mount --bind "$1" {_STAGE} && shift && exec "$@"'
    return ("unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(folder), "setpriv", *identity)


def _options(workspace: str, *, passwd_fd: int, report_fd: int) -> list[str]:
    return [
        *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup", "--die-with-parent", "--new-session", "--as-pid-1", "--json-status-fd", str(report_fd)),
        *("--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr", *_system()),
        *("--ro-bind-data", str(passwd_fd), "/etc/passwd", "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(TMP_BYTES), "--tmpfs", "/tmp"),
        *("--bind", workspace, "/workspace", "--chdir", "/workspace", "--remount-ro", "/"),
        *("--clearenv", "--setenv", "PATH", PATH, "--setenv", "HOME", "/workspace", "--setenv", "USER", "agent"),
        *("--setenv", "LANG", "C.UTF-8", "--setenv", "TERM", "dumb"),
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
