"""What the kernel lets a process of the sandbox have, set by that process before it becomes a command."""

from __future__ import annotations

import resource


def limit_resources(limits: dict[str, int]) -> None:
    """Of the calling process and all that come from it; it can't raise them again."""
    for name, limit in (
        (resource.RLIMIT_AS, limits["address_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
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
    if limits["kernel_processes"]:
        limit = limits["kernel_processes"]
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
