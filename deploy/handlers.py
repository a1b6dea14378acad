"""Whether the fleets will be able to load a run's handler: asked before anything starts."""

from __future__ import annotations

from pathlib import Path

from common.config import RunConfig
from common.errors import SetupError
from deploy import in_fleet

LOAD = "import sys; from workers.handlers.registry import load_handler; load_handler(sys.argv[1])"


def check_handler(config: RunConfig) -> None:
    """Raise SetupError with the reason why the handler's module or class cannot be loaded."""
    try:
        why = in_fleet.complaint(LOAD, config.handler)
    except TimeoutError:
        raise SetupError(
            f"run {config.name}: handler {config.handler!r} is not loaded after {in_fleet.TIMEOUT_S:.0f} s"
        ) from None
    if why is not None:
        raise SetupError(
            f"run {config.name}: the handler cannot be loaded: {why.removeprefix('ValueError: ')}. Its module must be "
            f"installed, or lie in {Path.cwd()} or in a folder that you set PYTHONPATH to"
        )
