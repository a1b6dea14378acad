"""Walls of Apptainer, for clusters without Docker: no daemon and no root; the image is a file or a folder.

The command server is the container's only program, as its first process, and speaks over its input and output, as with
Docker. NOT RUN AGAINST A REAL APPTAINER HERE: tests play it by a program that takes the same options and puts up
bubblewrap's walls. So the container itself looks whether the walls stand before it serves (`container_start`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

from common.config import SandboxKind
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.sandbox import container_start, seccomp
from workers.sandbox.launching import PATH, Remarks, server_config, task_files
from workers.sandbox.process import Launched, start
from workers.sandbox.protocol import Limits
from workers.sandbox.server_text import server_text

CGROUPS = Path("/sys/fs/cgroup")
DISK = "/workspace"
"""Scratch in memory, as large as the cluster's `sessiondir max size`; /tmp is part of it."""
STATE = "/tmp/.sandbox"
REMEDIES = {
    "executable file not found": "the image has no python3, which runs the command server: build it in",
    "no such file or directory": "the image is gone, or has no python3: build it anew",
    "user namespace": "user namespaces are off: ask for user.max_user_namespaces > 0, or for apptainer-suid",
    "permission denied": "the worker's user may not read the image",
    "no space left": "the session folder is full: ask for a larger `sessiondir max size` in apptainer.conf",
}


class Apptainer:
    """One container for a session's commands."""

    name: SandboxKind = "apptainer"

    def __init__(
        self, image: Path, *, program: str = "apptainer", limits: Limits | None = None, has_ip: bool = False
    ) -> None:
        """`program`: its name or path. `has_ip`: whether commands may use the container's own loopback."""
        self.image = image
        self._program = program
        self._has_ip = has_ip
        self.limits = limits or Limits()

    def launch(self, folder: Path) -> Launched:
        program = shutil.which(self._program)
        if program is None:
            raise EpisodeError(
                Outcome.SANDBOX_FAILED,
                f"{self._program} is not in PATH: load its module, or install it (apptainer.org), then start the fleet",
            )
        remarks, (ours, theirs) = Remarks(), socket.socketpair()
        with ExitStack() as undo, theirs:
            undo.callback(ours.close)
            process = start(
                command_line(program, self.image, self.limits),
                # It needs its helpers' folders and the user's home, and passes neither on.
                env={name: os.environ.get(name, default) for name, default in (("PATH", PATH), ("HOME", "/"))},
                cwd=Path("/"),
                pass_fds=(),
                remarks_fd=remarks.fd,
                stdio_fd=theirs.fileno(),
            )
            undo.pop_all()
        return Launched(
            process=process,
            stream=ours,
            inner=lambda: None,
            remarks=lambda: explained(remarks.last()),
            first=greeting(folder, self.limits, has_ip=self._has_ip),
        )


def command_line(program: str, image: Path, limits: Limits, *, cgroups: Path = CGROUPS) -> list[str]:
    """Everything that Apptainer shares with the machine by default is turned off."""
    return [
        *(program, "--quiet", "exec", "--userns", "--containall", "--no-init", "--no-home", "--cleanenv", "--no-eval"),
        *("--no-privs", "--no-mount", "cwd,hostfs,bind-paths", "--net", "--network", "none", "--hostname", "sandbox"),
        *("--scratch", DISK, *_cgroup_options(limits, cgroups)),
        *(str(image), "python3", "-I", "-S", "-c", Path(container_start.__file__).read_text(encoding="utf-8")),
    ]


def _cgroup_options(limits: Limits, cgroups: Path) -> tuple[str, ...]:
    """Where control groups v2 are delegated to the user; elsewhere Apptainer refuses them, and the server watches."""
    user = os.getuid()
    delegated = cgroups / "user.slice" / f"user-{user}.slice" / f"user@{user}.service" / "cgroup.controllers"
    try:
        controllers = delegated.read_text().split()
    except OSError:
        return ()
    return (
        *(("--memory", str(limits.memory_bytes + limits.disk_bytes)) if "memory" in controllers else ()),
        *(("--pids-limit", str(limits.num_processes + 4)) if "pids" in controllers else ()),
        *(("--cpus", f"{limits.cpus:g}") if "cpu" in controllers else ()),
    )


def greeting(folder: Path, limits: Limits, *, has_ip: bool = False) -> bytes:
    """What the container is told first: `container_start` reads it."""
    most = limits.num_processes
    config = server_config(limits, state_folder=STATE, disks=(DISK,), kernel_processes=most, counts_files=True)
    given = {
        "folders": [DISK, "/tmp"],
        "made": [STATE],
        "walls": None,
        "is_alone": True,
        "filter": base64.b64encode(seccomp.program(has_ip=has_ip)).decode() if seccomp.is_known() else None,
        "environment": {"HOME": DISK, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"},
        "files": task_files(folder),
        "server": server_text().decode(),
        "config": config,
    }
    body = json.dumps(given).encode()
    return struct.pack(">I", len(body)) + body


def explained(said: str) -> str:
    """Apptainer's last words, with the remedy where it is known."""
    for sign, remedy in REMEDIES.items():
        if said.startswith("FATAL") and sign in said.lower():
            return f"{remedy} ({said})"
    return said
