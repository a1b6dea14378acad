"""Whether the fleets will be able to load a run's handler: asked before anything starts, of a process like theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.config import RunConfig
from common.errors import SetupError

LOAD_TIMEOUT_S = 120.0
# In a process of its own, with the fleets' path and environment: what a handler imports stays out of this one.
LOAD = "import sys; from workers.handlers.registry import load_handler; load_handler(sys.argv[1])"


def check_handler(config: RunConfig) -> None:
    """Raise SetupError with the reason why the handler's module or class cannot be loaded."""
    command = [sys.executable, "-c", LOAD, config.handler]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"run {config.name}: handler {config.handler!r} is not loaded after {LOAD_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1].removeprefix("ValueError: ") if said else f"exit code {done.returncode}"
        raise SetupError(
            f"run {config.name}: the handler cannot be loaded: {why}. Its module must be installed, "
            f"or lie in {Path.cwd()} or in a folder that you set PYTHONPATH to"
        )
