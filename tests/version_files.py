"""What a version of the weights is made of where its content does not matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def writing(name: str, content: bytes) -> Callable[[Path], None]:
    """For `publish`: fills the version's folder with this one file."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write
