"""Options that commands share, and the settings that they change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.errors import SetupError
from common.settings import Settings, load_settings

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder with database, weights and logs.", show_default="ROLLMILL_DATA_DIR"),
]


def settings_for(data_dir: Path | None) -> Settings:
    """The settings, with the data folder as an absolute path; None = where the settings say.

    Raises SetupError where something else has the folder's name.
    """
    settings = load_settings()
    folder = (data_dir or settings.data_dir).absolute()
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"data folder {folder} is not a folder: name another with --data-dir or ROLLMILL_DATA_DIR")
    return settings.model_copy(update={"data_dir": folder})
