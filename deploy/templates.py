"""Whether a run's prompts can be made: its chat template must extend, its tokenizer must fit its model."""

from __future__ import annotations

from common.config import RunConfig
from common.errors import SetupError
from deploy import in_fleet

PROVE = (
    "import sys; from common.config import RunConfig; from workers.render.of_run import renderer_of; "
    "renderer_of(RunConfig.model_validate_json(sys.argv[1]))"
)
_ERROR = "common.errors.SetupError: "


def check_template(config: RunConfig) -> None:
    """Raise SetupError that names the model and what its template or tokenizer lacks."""
    try:
        why = in_fleet.complaint(PROVE, config.model_dump_json())
    except TimeoutError:
        raise SetupError(
            f"run {config.name}: the chat template of {config.model} is not proved after {in_fleet.TIMEOUT_S:.0f} s"
        ) from None
    if why is not None:
        raise SetupError(f"run {config.name}: {why.removeprefix(_ERROR)}")
