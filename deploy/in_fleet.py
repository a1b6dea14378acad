"""Asks a process like a fleet's whether something will work there; what that imports stays out of this one."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT_S = 120.0


def complaint(code: str, argument: str) -> str | None:
    """Last line that `python -c code argument` says when it fails, with the fleets' path and environment; None = it
    ends well.

    Raises TimeoutError after TIMEOUT_S.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if not done.returncode:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"
