"""What the file tools can be asked for; `SandboxSession.file` takes them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """About one file of the sandbox."""

    path: str
    """Below the sandbox's folder: relative to it, or with it in front. No part of it may be a link or `..`."""

    def body(self) -> dict[str, object]:
        """As the command server reads it."""
        return {"tool": _TOOLS[type(self)], **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ViewFile(FileRequest):
    """Lines of a text file, numbered; of a folder, the names in it."""

    first_line: int | None = None
    """From 1; None = from the beginning."""
    last_line: int | None = None
    """It too is shown; None = to the end."""


@dataclass(frozen=True, kw_only=True)
class WriteFile(FileRequest):
    """The whole file, new or in place of another; folders above it are made. It is there whole, or not at all."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ReplaceInFile(FileRequest):
    """Put one text in place of another that the file holds exactly once."""

    old: str
    new: str


_TOOLS = {ViewFile: "view", WriteFile: "write", ReplaceInFile: "replace"}
