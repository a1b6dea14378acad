"""Whether a run's prompts can be made: its chat template must extend, its tokenizer must fit its model."""

from __future__ import annotations

import subprocess
import sys

from common.config import RunConfig
from common.errors import SetupError

PROVE_TIMEOUT_S = 120.0
# In a process of its own: what renders belongs to the fleets.
PROVE = (
    "import sys; from common.config import RunConfig; from workers.render.of_run import renderer_of; "
    "renderer_of(RunConfig.model_validate_json(sys.argv[1]))"
)
_ERROR = "common.errors.SetupError: "


def check_template(config: RunConfig) -> None:
    """Raise SetupError that names the model and what its template or tokenizer lacks."""
    command = [sys.executable, "-c", PROVE, config.model_dump_json()]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PROVE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"run {config.name}: the chat template of {config.model} is not proved after {PROVE_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise SetupError(f"run {config.name}: {lines[-1].removeprefix(_ERROR)}")
