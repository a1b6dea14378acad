"""Raises a process's own limit of open files: each request under way is a socket, each sandbox several pipes."""

from __future__ import annotations

import resource

from common.errors import SetupError


def raise_open_files(wanted: int) -> None:
    """Allow `wanted` open files; a higher limit stays. Raises SetupError where the system allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SetupError(
            f"{wanted} open files are needed and the hard limit is {hard}: raise it (ulimit -Hn, LimitNOFILE= of "
            "systemd, --ulimit nofile= of containers), or do less at once"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
