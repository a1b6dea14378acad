"""Base of the sections of a run's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from common.storable import check_storable, check_time

STORED = "stored"
"""Context in which a configuration is validated that was stored with its run. What only later rules refuse goes on as
it did when it was stored: else one such run would stop the feeder for all."""


class Section(BaseModel):
    """Base of the sections: unknown keys are errors, and so is what cannot be stored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: object, info: ValidationInfo) -> object:
        check_storable(str(value) if isinstance(value, Path) else value)
        check_time(info.field_name, value)
        return value
