"""First code of every supervised process: it ties the process to the supervisor's life, then becomes the program.

Run as a script: `python -I -S child.py SUPERVISOR_PID DEATH_SIGNAL IDENTITY PROGRAM ARGUMENT...`. A program of its own
instead of a hook between fork and exec, because such a hook may deadlock in a supervisor that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from enum import StrEnum
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT = 1, 8, 47
PR_CAP_AMBIENT_RAISE = 2
CLONE_NEWUSER = 0x10000000
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
NOBODY = 65534


class Identity(StrEnum):
    """As whom a program runs. Postgres refuses to run as root, whose files it must nevertheless read."""

    SAME = "same"
    """As the supervisor's user."""
    MAPPED = "mapped"
    """Root, but called 65534 inside a user namespace of its own: files stay root's, no user is made."""
    NOBODY = "nobody"
    """User 65534 with root's right to pass folders, for machines that forbid user namespaces (containers)."""


def main(arguments: list[str]) -> None:
    """Become the program; end with a line on stderr and exit code 127 where that is impossible."""
    supervisor_pid, death_signal, identity, program, *_ = arguments
    try:
        assume(Identity(identity))
        _call("prctl", PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != int(supervisor_pid):
            sys.exit(f"{program}: the supervisor {supervisor_pid} is gone")
        # The interpreter ignores these two, and an ignored signal stays ignored in the program.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(program, arguments[3:])
    except OSError as error:
        sys.stderr.write(f"cannot run {program} as {identity}: {error}\n")
        sys.exit(127)


def assume(identity: Identity) -> None:
    """Change to the identity. Raises OSError where the machine does not allow it."""
    if identity is Identity.MAPPED:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    elif identity is Identity.NOBODY:
        _call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        keep = 1 << CAP_DAC_OVERRIDE
        _call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), struct.pack("6I", keep, keep, keep, 0, 0, 0))
        _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)


def _call(name: str, *arguments: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(word) if isinstance(word, int) and name == "prctl" else word for word in arguments]
    if libc[name](*words) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


if __name__ == "__main__":
    main(sys.argv[1:])
