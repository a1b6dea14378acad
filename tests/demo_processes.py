"""The processes of a one-machine stack, as the kernel knows them."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(data_dir: Path) -> list[int]:
    """Pids of the processes that were started for this data folder and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(data_dir).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]
