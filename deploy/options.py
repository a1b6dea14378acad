"""Options that commands share, and the settings that they change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.settings import Settings, load_settings

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with database, weights and logs.", show_default="ROLLMILL_DATA_DIR"),
]


def settings_for(data_dir: Path | None) -> Settings:
    """The settings, with the data folder as an absolute path; None = where the settings say."""
    settings = load_settings()
    return settings.model_copy(update={"data_dir": (data_dir or settings.data_dir).absolute()})
