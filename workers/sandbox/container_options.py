"""How a sandbox's container is made: what it may use, and what it is kept from. For `ContainerEngine.create`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docker.types import LogConfig

from workers.sandbox import container_start, proxy_socket
from workers.sandbox.container_engine import EngineFacts
from workers.sandbox.protocol import Limits

USER = 1000
STATE = "/.sandbox/state"
PROXY = "/.sandbox/proxy"
DISKS = ("/workspace", "/tmp", "/dev/shm")
SLACK_BYTES = 128 << 20
"""Beyond what commands may use: the server, and what the kernel counts that no process shows."""
SLACK_PROCESSES = 4
CPU_WEIGHT = 256
"""Of 1024 that other containers have: commands must not keep the machine's services waiting."""


def memory_bytes(limits: Limits) -> int:
    """The kernel's limit: all that commands may use, their disk included, which lies in memory.

    The server's own look comes first, so that the agent is told which limit it met.
    """
    return limits.memory_bytes + sum(_disk_bytes(limits).values()) + SLACK_BYTES


def num_processes(limits: Limits) -> int:
    """The kernel's limit, the server and the threads that start a command included."""
    return limits.num_processes + SLACK_PROCESSES


def host_options(
    limits: Limits,
    facts: EngineFacts,
    *,
    runtime: str | None,
    profile: str,
    proxy_folder: Path | None,
) -> dict[str, Any]:
    """Walls and limits. `profile`: the system calls' list, or for Podman, which reads no text, a file's path.

    `proxy_folder`: where the worker waits for the proxy's socket; None = there is no proxy.
    """
    most_bytes = memory_bytes(limits)
    return {
        "network_mode": "none",
        "read_only": True,
        "tmpfs": _file_systems(limits, facts),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", f"seccomp={profile}"],
        "mem_limit": most_bytes,
        "memswap_limit": most_bytes,
        "pids_limit": num_processes(limits),
        "nano_cpus": int(min(limits.cpus, facts.num_cpus) * 1e9),
        "cpu_shares": CPU_WEIGHT,
        # A worker that dies leaves no container: its server ends when its input does.
        "auto_remove": True,
        # What the server answers is no log.
        "log_config": LogConfig(type="none"),
        "runtime": runtime,
        "binds": {} if proxy_folder is None else {str(proxy_folder): {"bind": PROXY, "mode": "ro"}},
    }


def process_options(labels: Mapping[str, str], *, has_proxy: bool) -> dict[str, Any]:
    """What runs in it, as whom. Its standard input ends with the worker's connection."""
    start = Path(container_start.__file__).read_text(encoding="utf-8")
    return {
        "entrypoint": ["python3", "-I", "-S", "-c", start],
        "stdin_open": True,
        "user": f"{USER}:{USER}",
        "hostname": "sandbox",
        "working_dir": "/",
        "environment": {"HOME": "/workspace", "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
        | (proxy_socket.ENVIRONMENT if has_proxy else {}),
        # An image's own check would be a process in the sandbox that nobody asked for.
        "healthcheck": {"test": ["NONE"]},
        "labels": dict(labels),
    }


def _disk_bytes(limits: Limits) -> dict[str, int]:
    """Engines have no file system that several folders share, so the disk is three."""
    shares = {"/workspace": 1.0, "/tmp": 0.5, "/dev/shm": 0.25}
    return {folder: int(limits.disk_bytes * shares[folder]) for folder in DISKS}


def _file_systems(limits: Limits, facts: EngineFacts) -> dict[str, str]:
    """Podman takes neither an owner nor a number of files; elsewhere the folder in the image may decide on the mode."""
    own = "mode=1777" if facts.is_podman else f"mode=0755,uid={USER},gid={USER},nr_inodes={limits.num_inodes}"
    plain = f"rw,nosuid,nodev,{own}"
    found = {folder: f"{plain},exec,size={size}" for folder, size in _disk_bytes(limits).items()}
    return found | {STATE: f"{plain},noexec,size={4 << 20}"}
