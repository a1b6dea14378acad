"""Run configurations as the database has them: another release may have stored what this one refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from common.config import RunConfig
from common.config_errors import stored_problem
from common.config_section import STORED
from common.errors import UnreadableConfig


def read_config(run: str, document: Mapping[str, Any]) -> RunConfig:
    """The configuration of the run of this name. Raises UnreadableConfig with run, field, value and what to do."""
    try:
        return RunConfig.model_validate(document, context=STORED)
    except ValidationError as error:
        raise UnreadableConfig(
            f"run {run}: this release cannot use its stored configuration: {stored_problem(error, RunConfig)}. "
            f"Go on with the release that stored it, or end the run by `rollmill run stop {run}` and start another one "
            "under another name"
        ) from None
