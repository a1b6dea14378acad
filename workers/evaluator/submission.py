"""What an agent hands in: plain files of its sandbox, taken by RUN when it has stopped, stored in Postgres for EVAL."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from common.episode import Frozen
from common.errors import EpisodeError
from common.outcomes import Outcome

MAX_TOTAL_BYTES = 8 << 20
MAX_NUM_FILES = 1000
MAX_NAME_BYTES = 4096
STEERING = (
    *("**/conftest.py", "**/sitecustomize.py", "**/usercustomize.py", "**/pytest.ini", "**/pytest.toml", "**/tox.ini"),
    *(
        "**/setup.cfg",
        "**/pyproject.toml",
        "**/*.pth",
        "**/*.pyc",
        "**/*.pyo",
        "**/__pycache__/**",
        "**/.*",
        "**/.*/**",
    ),
)
"""Files by which a test runner, an interpreter or git are told what to do: none of them is a solution."""


class FileRules(Frozen):
    """Which files of the sandbox are the agent's answer. Patterns know `*`, `?` and, for any folders, `**/`.

    Raises ValueError for patterns that match nothing, and for limits beyond MAX_TOTAL_BYTES and MAX_NUM_FILES: Postgres
    keeps what is handed in.
    """

    wanted: tuple[str, ...]
    """Relative to the sandbox's folder."""
    refused: tuple[str, ...] = STEERING
    """Left out even if wanted."""
    file_bytes: int = 1 << 20
    total_bytes: int = 4 << 20
    num_files: int = 200

    def model_post_init(self, context: object) -> None:
        """See that it can be kept, and that patterns can match."""
        for pattern in (*self.wanted, *self.refused):
            if not is_plain(pattern) or any(sign in pattern for sign in "[]{}"):
                raise ValueError(
                    f"pattern {pattern!r} matches nothing: it must be a plain relative path, with *, ? and **/ only"
                )
        if not self.wanted:
            raise ValueError("wanted is empty: no file would be taken")
        if self.file_bytes < 1:
            raise ValueError(f"file_bytes={self.file_bytes} must be positive")
        if not 0 < self.total_bytes <= MAX_TOTAL_BYTES or not 0 < self.num_files <= MAX_NUM_FILES:
            raise ValueError(
                f"total_bytes={self.total_bytes} and num_files={self.num_files} must be positive, and at most "
                f"{MAX_TOTAL_BYTES} and {MAX_NUM_FILES}"
            )

    @cached_property
    def wanted_pattern(self) -> str:
        """As a regular expression for a whole path."""
        return _expression(self.wanted)

    @cached_property
    def refused_pattern(self) -> str:
        """As a regular expression for a whole path."""
        return _expression(self.refused)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The files that an agent handed in. Their content is the agent's: data, never to be run or imported out here."""

    files: Mapping[str, bytes]
    """Relative path -> content."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Wanted files that did not come along, by reason: link, special, hard_link, name, refused, too_large, too_many,
    too_deep, unreadable. `time` = it took too long to look for more, counted once."""

    def text(self, name: str) -> str | None:
        """A file as text; None = it is not there. Bytes that are no UTF-8 become U+FFFD."""
        content = self.files.get(name)
        return None if content is None else content.decode(errors="replace")

    def pack(self) -> bytes:
        """For Postgres, compressed."""
        frames = []
        for name, content in self.files.items():
            encoded = name.encode()
            frames += [struct.pack(">II", len(encoded), len(content)), encoded, content]
        return zlib.compress(b"".join(frames))

    @classmethod
    def unpack(cls, packed: bytes, left_out: Mapping[str, int]) -> Submission:
        """What `pack` made."""
        return cls(files=read_frames(zlib.decompress(packed)), left_out=left_out)


def read_frames(data: bytes) -> dict[str, bytes]:
    """Files out of frames: lengths of name and content, name, content. Raises ValueError."""
    files: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        if len(data) - at < 8:
            raise ValueError("half a frame")
        num_name, num_content = struct.unpack_from(">II", data, at)
        end = at + 8 + num_name + num_content
        if num_name > MAX_NAME_BYTES or end > len(data):
            raise ValueError(f"a frame of {num_name} and {num_content} bytes")
        name = data[at + 8 : at + 8 + num_name].decode()
        if name in files or not is_plain(name):
            raise ValueError(f"file name {name!r:.80}")
        files[name] = data[at + 8 + num_name : end]
        at = end
    return files


def is_plain(name: str) -> bool:
    """Whether it is a relative path of visible characters that leads nowhere else."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and not name.startswith("/")
    return plain and ".." not in parts and name.isprintable() and "\\" not in name


def checked(rules: FileRules, files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The files, if the rules allow each: a sandbox is not believed. Raises EpisodeError."""
    trouble = None
    if len(files) > rules.num_files or sum(map(len, files.values())) > rules.total_bytes:
        trouble = f"{len(files)} files of {sum(map(len, files.values()))} bytes"
    for name, content in files.items():
        if not re.fullmatch(rules.wanted_pattern, name) or re.fullmatch(rules.refused_pattern, name):
            trouble = f"file {name!r:.80}, which nobody asked for"
        elif len(content) > rules.file_bytes:
            trouble = f"file {name!r:.80} of {len(content)} bytes"
    if trouble is not None:
        raise EpisodeError(Outcome.SANDBOX_FAILED, f"the sandbox hands over {trouble}")
    return files


def _expression(patterns: tuple[str, ...]) -> str:
    return "|".join(f"(?:{_translated(pattern)})" for pattern in patterns) or r"(?!)"


def _translated(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    known = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known[part] if part in known else re.escape(part) for part in parts)
