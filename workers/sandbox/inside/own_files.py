"""The server's own files in the sandbox, which commands can reach and change."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def clear_folder(folder: str) -> None:
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            forgiving(os.unlink, os.path.join(top, name))
        for name in folders:
            path = os.path.join(top, name)
            forgiving(os.unlink if os.path.islink(path) else os.rmdir, path)


def forgiving(call: Any, *arguments: Any) -> None:
    """Call it; what the system refuses is left as it is."""
    try:
        call(*arguments)
    except OSError:
        pass


def write_file(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
