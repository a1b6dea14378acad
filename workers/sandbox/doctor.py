"""`python -m workers.sandbox.doctor`: which sandboxes work on this node, what keeps commands in, what is missing.

Exit code 0 = commands of agents get walls here, 1 = they do not.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import SetupError
from workers.sandbox import seccomp
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.launching import PATH, server_python

CGROUPS = Path("/sys/fs/cgroup")
KERNEL = Path("/proc/sys")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing of the node, or one kind of sandbox."""

    name: str
    state: str
    """What is there, in a few words."""
    means: str
    """What that gives to a sandbox."""
    remedy: str = ""
    """How to get what is missing; empty = nothing is."""


def backends(data_dir: Path) -> list[Finding]:
    """Each kind of sandbox, tried where sandboxes will lie. Raises SetupError when nothing can lie there."""
    folders = SandboxFolders.below(data_dir)
    probe = f"0-{os.getpid()}"  # no episode has number 0
    folders.create(probe, {})
    try:
        trouble = Bubblewrap().trouble(folders.path(probe))
    finally:
        folders.destroy(probe)
    walls = "own files, processes, users, network (none); limits of memory, disk, processes, time, output"
    calls = "system calls filtered" if seccomp.is_known() else "SYSTEM CALLS NOT FILTERED"
    return [
        Finding(
            name="bubblewrap",
            state="works" if trouble is None else f"does not work: {trouble}",
            means=f"{walls}; {calls}" if trouble is None else "agents' commands run without walls here",
            remedy="" if trouble is None else _remedy(trouble),
        ),
        Finding(
            name="restricted",
            state="works, used" if trouble is not None else "works, not used",
            means=f"limits only, as {'a user without rights' if os.geteuid() == 0 else 'YOUR OWN user'}; no walls",
        ),
    ]


def _remedy(trouble: str) -> str:
    if "bubblewrap is not installed" in trouble:
        return "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
    if "python3 is not installed" in trouble:
        return "apt-get install python3: sandboxes see the system's Python, not the worker's environment"
    if _number("user/max_user_namespaces") == 0 or _number("kernel/unprivileged_userns_clone") == 0:
        return "sysctl user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1"
    if _number("kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that lets bwrap use userns"
        )
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start this container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return "user namespaces, mounts in them and overlayfs (Linux 5.11 or newer) must be allowed"


def node() -> list[Finding]:
    """What the node gives to all sandboxes."""
    namespaces = _number("user/max_user_namespaces")
    restricted = _number("kernel/apparmor_restrict_unprivileged_userns") == 1
    return [
        Finding(name="kernel", state=f"{platform.release()} {platform.machine()}", means="overlay for users: 5.11+"),
        Finding(
            name="user namespaces",
            state="off" if namespaces == 0 else "restricted by AppArmor" if restricted else "on",
            means="walls without root" if namespaces != 0 else "no walls",
            remedy="" if namespaces != 0 and not restricted else "see bubblewrap",
        ),
        _cgroups(),
        Finding(
            name="seccomp",
            state="on" if (KERNEL / "kernel/seccomp").is_dir() and seccomp.is_known() else "no filter",
            means="no AF_VSOCK, io_uring, ptrace, bpf, keys, mounts",
            remedy="" if seccomp.is_known() else f"no table of system calls for {platform.machine()}: x86_64, aarch64",
        ),
        Finding(name="python3", state=server_python() or "missing", means="runs the command server in the sandbox"),
        Finding(
            name="gVisor",
            state=shutil.which("runsc", path=PATH) or "not installed",
            means="a kernel of its own for each sandbox: no kind of sandbox of this version uses it",
        ),
    ]


def _cgroups() -> Finding:
    if (CGROUPS / "cgroup.controllers").exists():
        controllers = (CGROUPS / "cgroup.controllers").read_text().split()
        state = f"v2 ({' '.join(controllers) or 'no controllers'})"
    elif (CGROUPS / "unified").is_dir():
        state = "hybrid: controllers on v1"
    else:
        state = "v1" if (CGROUPS / "memory").is_dir() else "none mounted"
    return Finding(
        name="control groups",
        state=state,
        means="not used: memory and processor time are watched by the server, processes counted by the user namespace",
    )


def _number(name: str) -> int | None:
    try:
        return int((KERNEL / name).read_text())
    except (OSError, ValueError):
        return None


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "here", "what that gives", "how to get it"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.name, finding.state, finding.means, finding.remedy)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m workers.sandbox.doctor", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="below which sandboxes will lie")
    console = Console()
    try:
        found = backends(parser.parse_args(argv).data_dir)
    except SetupError as error:
        sys.stderr.write(f"rollmill sandbox doctor: {error}\n")
        return 2
    console.print(_table("sandboxes", found), _table("this node", node()))
    works = found[0].state == "works"
    console.print(f"agents' commands get {'walls here' if works else 'NO WALLS here'}", highlight=False)
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
