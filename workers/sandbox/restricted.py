"""Limits without walls: for machines without bubblewrap, and for commands that you trust. `open_backend` warns."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from common.config import SandboxKind
from workers.sandbox.folder import AGENT_UID
from workers.sandbox.launching import PATH, Remarks, server_config, server_python
from workers.sandbox.process import Launched, start
from workers.sandbox.protocol import Limits
from workers.sandbox.server_text import server_text

NUM_PROCESSES = 1024
"""Of all sandboxes together."""


class Restricted:
    """A session of its own, an empty environment, resource limits.

    Commands read and write what their user can: a user without any rights if the worker is root, else the worker's
    own. They write into the folder itself, without a limit to their sum. Processes are counted for all sandboxes
    together, and only where they have a user of their own: else yours would count too.
    """

    name: SandboxKind = "subprocess"

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def launch(self, folder: Path) -> Launched:
        user = AGENT_UID if os.geteuid() == 0 else None
        most = 0 if user is None else NUM_PROCESSES
        config = server_config(self.limits, state_folder=None, disks=(), kernel_processes=most)
        ours, theirs = socket.socketpair()
        remarks = Remarks()
        with ExitStack() as undo, theirs:
            undo.callback(ours.close)
            # As text, since the commands' user may not be able to reach the file.
            server = ("-I", "-S", "-c", server_text().decode(), str(theirs.fileno()), str(theirs.fileno()), config)
            process = start(
                [server_python() or sys.executable, *server],
                env={"PATH": PATH, "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "dumb"},
                cwd=folder,
                pass_fds=(theirs.fileno(),),
                remarks_fd=remarks.fd,
                user=user,
            )
            undo.pop_all()
        return Launched(process=process, stream=ours, inner=lambda: None, remarks=remarks.last)
