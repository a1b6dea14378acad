"""`python -m workers.sandbox.doctor`: which sandboxes work on this node, what keeps commands in, what is missing.

Exit code 0 = commands of agents get walls here as the settings are, 1 = they do not, 2 = a setting is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import EpisodeError, SetupError
from common.settings import Settings, load_settings
from workers.sandbox import seccomp
from workers.sandbox.apptainer_images import ApptainerImages
from workers.sandbox.bubblewrap import Bubblewrap
from workers.sandbox.cgroup import find_groups
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.containers import GVISOR, Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.launching import PATH, server_python

CGROUPS = Path("/sys/fs/cgroup")
KERNEL = Path("/proc/sys")
UNTRIED = "its command line was never run against a real Apptainer by rollmill's own tests"


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


def backends(given: Settings) -> list[Finding]:
    """Each kind of sandbox, tried where sandboxes will lie. Raises SetupError when nothing can lie there."""
    folders = SandboxFolders.below(given.data_dir)
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
        containers(folders, given),
        apptainer(folders, given),
        Finding(
            name="subprocess",
            state=f"works, {'used' if _chosen(given, trouble) == 'subprocess' else 'not used'}",
            means=f"limits only, as {'a user without rights' if os.geteuid() == 0 else 'YOUR OWN user'}; "
            "NO WALLS: only for commands that you trust",
        ),
    ]


def _chosen(given: Settings, trouble: str | None) -> str:
    """The kind that an episode gets when neither its task nor its run names one."""
    if given.sandbox != "auto":
        return given.sandbox
    return "docker" if given.sandbox_image is not None else "subprocess" if trouble is not None else "bubblewrap"


def containers(folders: SandboxFolders, given: Settings) -> Finding:
    """Docker or Podman, whichever answers; with an image, one container is started."""
    engine = ContainerEngine(given.docker_url)
    backend = Containers(
        folders, engine, image=given.sandbox_image, pull=given.sandbox_pull, runtime=given.sandbox_runtime
    )
    try:
        facts = engine.facts()
        rootless = ", rootless" if facts.is_rootless else ""
        state = f"{facts.name}{rootless}, control groups v{facts.cgroup_version}, {facts.disk}"
        if given.sandbox_image is not None:
            backend.prove(given.sandbox_image)
            state = f"works: {state}"
    except EpisodeError as error:
        return Finding(
            name="docker",
            state="does not work",
            means="images by name, limits by the kernel, gVisor",
            remedy=f"{error.detail}; apt-get install docker.io or podman (Debian, Ubuntu)",
        )
    finally:
        backend.close()
    gvisor = "gVisor: ROLLMILL_SANDBOX_RUNTIME=runsc" if GVISOR in facts.runtimes else "no gVisor (runsc)"
    return Finding(
        name="docker",
        state=state,
        means=f"images by name, own files, processes, network (none), limits by the kernel, calls filtered; {gvisor}",
        remedy="" if given.sandbox_image is not None else "not tried: set ROLLMILL_SANDBOX_IMAGE",
    )


def apptainer(folders: SandboxFolders, given: Settings) -> Finding:
    """Whether it is there; one container is started where the settings choose it."""
    found = shutil.which("apptainer")
    means = f"image files, no daemon, own files, processes, network (none), calls filtered; {UNTRIED}"
    if found is None:
        remedy = "load its module, or install it (apptainer.org)"
        return Finding(name="apptainer", state="not installed", means=means, remedy=remedy)
    if given.sandbox != "apptainer":
        remedy = "not tried: set ROLLMILL_SANDBOX=apptainer and ROLLMILL_SANDBOX_IMAGE"
        return Finding(name="apptainer", state=found, means=means, remedy=remedy)
    images = ApptainerImages(folders, image=given.sandbox_image)
    try:
        images.prove(images.walls())
    except EpisodeError as error:
        return Finding(name="apptainer", state="does not work", means=means, remedy=error.detail)
    return Finding(name="apptainer", state=f"works: {found}", means=means)


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


def node(given: Settings) -> list[Finding]:
    """What the node gives to all sandboxes."""
    namespaces = _number("user/max_user_namespaces")
    restricted = _number("kernel/apparmor_restrict_unprivileged_userns") == 1
    return [
        Finding(name="node", state=given.node, means="RUN takes what INIT prepares here; named by ROLLMILL_NODE"),
        Finding(name="kernel", state=f"{platform.release()} {platform.machine()}", means="overlay for users: 5.11+"),
        Finding(
            name="user namespaces",
            state="off" if namespaces == 0 else "restricted by AppArmor" if restricted else "on",
            means="walls without root" if namespaces != 0 else "no walls",
            remedy="" if namespaces != 0 and not restricted else "see bubblewrap",
        ),
        _cgroups(),
        _groups(given),
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
            means="a kernel of its own for each container, where the engine knows it",
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
        means="limits of containers by the kernel",
    )


def _groups(given: Settings) -> Finding:
    """Raises SetupError when the folder of the settings can't be used."""
    groups = find_groups(given.sandbox_cgroup)
    if isinstance(groups, str):
        return Finding(
            name="groups for bubblewrap",
            state=f"none: {groups}",
            means="rlimits; the sandbox's server watches memory, 20 times a second, and counts processes",
            remedy="control groups v2 with memory and pids, delegated to the workers: ROLLMILL_SANDBOX_CGROUP, or "
            "systemd-run --user -p Delegate=yes",
        )
    return Finding(
        name="groups for bubblewrap", state=str(groups.folder), means="memory, processes, processors by the kernel"
    )


def _number(name: str) -> int | None:
    try:
        return int((KERNEL / name).read_text())
    except (OSError, ValueError):
        return None


def _table(title: str, findings: list[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "here", "what that gives", "how to get it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, finding.state, finding.means, finding.remedy)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m workers.sandbox.doctor", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="below which sandboxes will lie")
    console = Console()
    try:
        given = load_settings().model_copy(update={"data_dir": parser.parse_args(argv).data_dir})
        found, of_node = backends(given), node(given)
    except SetupError as error:
        sys.stderr.write(f"rollmill sandbox doctor: {error}\n")
        return 2
    console.print(_table("sandboxes", found), _table("this node", of_node))
    verdict, has_walls = _verdict(given, {finding.name: finding for finding in found})
    console.print(verdict, highlight=False, markup=False, soft_wrap=True)
    return 0 if has_walls else 1


def _verdict(given: Settings, found: Mapping[str, Finding]) -> tuple[str, bool]:
    """What becomes of commands whose task and run name no kind, and whether they get walls."""
    bubblewrap = found["bubblewrap"].state
    kind = _chosen(given, None if bubblewrap == "works" else bubblewrap)
    if kind == "subprocess":
        return "agents' commands get NO WALLS here", False
    chosen = found[kind]
    if chosen.state.startswith("works"):
        return "agents' commands get walls here", True
    if kind == "docker" and chosen.state != "does not work":
        return f"only tasks and runs that name an image would run; {chosen.remedy}", False
    return f"nothing would run: {kind}: {chosen.state}{chosen.remedy and f'; {chosen.remedy}'}", False


if __name__ == "__main__":
    sys.exit(main())
