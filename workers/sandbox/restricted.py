"""Limits without walls: for machines without bubblewrap, and for commands that you trust. `open_backend` warns."""

from __future__ import annotations

import os
from pathlib import Path

from workers.sandbox.bubblewrap import PATH
from workers.sandbox.folder import AGENT_UID
from workers.sandbox.process import run_process
from workers.sandbox.protocol import ExecResult

LIMITS = ("--as=2147483648:2147483648", "--fsize=268435456:268435456", "--nofile=1024:1024", "--core=0:0")
"""Of each process, in bytes where it is a size."""
NUM_PROCESSES = 256
"""Of all sandboxes together, and only where they have a user of their own: else yours would count too."""


class Restricted:
    """A session of its own, an empty environment, resource limits. A process that leaves the group outlives it.

    It reads and writes what its user can: a user without any rights if the worker is root, else the worker's own.
    """

    name = "restricted"

    async def run(self, folder: Path, command: str, *, timeout_s: float) -> ExecResult:
        user = AGENT_UID if os.geteuid() == 0 else None
        limits = LIMITS if user is None else (*LIMITS, f"--nproc={NUM_PROCESSES}:{NUM_PROCESSES}")
        ended = await run_process(
            ["prlimit", *limits, "--", "/bin/bash", "-c", command],
            timeout_s=timeout_s,
            env={"PATH": PATH, "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "dumb"},
            cwd=folder,
            user=user,
        )
        exit_code = 128 - ended.returncode if ended.returncode < 0 else ended.returncode
        return ExecResult(
            exit_code=None if ended.timed_out else exit_code,
            output=ended.output,
            timed_out=ended.timed_out,
            num_dropped_bytes=ended.num_dropped_bytes,
        )
