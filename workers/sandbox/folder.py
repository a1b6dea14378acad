"""The folders behind sandboxes: made with their files by INIT, bound into each command, removed whatever is in them.

After a command has run, the agent decides what lies in its folder. Nothing here follows a link or trusts a mode.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from workers.sandbox.owners import Owners

AGENT_UID = 65_432
"""User and group of commands when the worker is root: an id that Debian reserves and gives to nobody."""
_FULL = "the node's disk is full: free room there, or set ROLLMILL_DATA_DIR to another disk"
_REMEDIES = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL}
EVALUATION = "-eval"
"""Ends the handle of a sandbox in which EVAL tests what an agent handed in."""
EVALUATION_LIFETIME_S = 24 * 3600.0
"""No EVAL takes longer."""
_HANDLE = re.compile(rf"[0-9]{{1,19}}-[0-9]{{1,9}}({EVALUATION})?")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class SandboxFolders:
    """All sandboxes' folders of a node, below one root that only the worker's user can enter."""

    root: Path

    @classmethod
    def below(cls, data_dir: Path) -> SandboxFolders:
        """Make the root. Raises SetupError when that can't be done."""
        root = data_dir.resolve() / "sandboxes"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"cannot make {root}: {error.strerror}; set ROLLMILL_DATA_DIR to a folder of yours"
            ) from error
        return cls(root=root)

    @property
    def owners(self) -> Owners:
        """The records of the sandboxes' processes, which lie beside the folders."""
        return Owners(root=self.root.with_name("sandbox-owners"))

    def path(self, handle: str) -> Path:
        """The handle's folder. Raises ValueError for a handle that this class did not make."""
        if not _HANDLE.fullmatch(handle):
            raise ValueError(f"{handle!r} is no sandbox handle")
        return self.root / handle

    def create(self, handle: str, files: Mapping[str, str]) -> None:
        """A fresh folder with these files, owned by the commands' user. Replaces what stood there."""
        for name in files:
            _check_name(name)
        path = self.path(handle)
        try:
            self.destroy(handle)
            path.mkdir(mode=0o755)
            for name, text in files.items():
                file = path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("x", encoding="utf-8", newline="") as out:
                    out.write(text)
            if os.geteuid() == 0:
                _give_away(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise EpisodeError(
                Outcome.HANDLER_FAILED, f"the sandbox's files {sorted(files)} collide: {error}", is_final=True
            ) from error
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "see that the worker may write there")
            raise EpisodeError(
                Outcome.SANDBOX_FAILED, f"cannot make sandbox {handle} in {self.root}: {error.strerror}: {remedy}"
            ) from error

    def require(self, handle: str) -> Path:
        """The folder, which must be there. Raises EpisodeError."""
        path = self.path(handle)
        if not self.exists(handle):
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"sandbox {handle} is gone from {self.root}")
        return path

    def exists(self, handle: str) -> bool:
        """Whether the folder is there."""
        path = self.path(handle)
        return path.is_dir() and not path.is_symlink()

    def forgotten_evaluations(self) -> list[str]:
        """Handles of sandboxes that an EVAL which was killed left behind; retried elsewhere, nobody replaces them."""
        before = time.time() - EVALUATION_LIFETIME_S
        forgotten = []
        for path in self.root.glob(f"*{EVALUATION}"):
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < before:
                    forgotten.append(path.name)
        return forgotten

    def destroy(self, handle: str) -> None:
        """End its processes and remove the folder; no error if they are gone. Raises EpisodeError when that fails."""
        path = self.path(handle)
        self.owners.end(handle)
        try:
            remove_tree(path)
        except OSError as error:
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"cannot remove sandbox {handle}: {error}") from error
        # Processes that were started meanwhile: their record is here by now, or they see that the folder is gone.
        self.owners.end(handle)


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    plain = "/".join(parts)
    if not parts or plain != name or name.startswith("/") or ".." in parts or "\0" in name:
        detail = f"file name {name!r}: must be a plain relative path without .."
        raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True)


def _give_away(root: Path) -> None:
    """Only called before any command has run: nothing in the folder is a link."""
    for folder, _, names in os.walk(root):
        os.chown(folder, AGENT_UID, AGENT_UID)
        for name in names:
            os.chown(Path(folder, name), AGENT_UID, AGENT_UID, follow_symlinks=False)


def remove_tree(path: Path) -> None:
    """Remove a folder of any depth, with any modes, without following a link. No error if it is gone.

    Folders inside folders are moved up to `path` before they are emptied. So any depth needs three open files and no
    recursion, where `shutil.rmtree` fails after some hundred levels.
    """
    parent = os.open(path.parent, _OPEN_FOLDER)
    try:
        top = _open_folder(path.name, parent)
    except FileNotFoundError:
        return
    finally:
        os.close(parent)
    try:
        names = _UnusedNames(top)
        while entries := _entries(top):
            for name, is_folder in entries:
                _remove_entry(name, top, names, is_folder=is_folder)
    finally:
        os.close(top)
    # Another reaper may remove the same folder at the same time, and be first.
    with suppress(FileNotFoundError):
        path.rmdir()


class _UnusedNames:
    """Names for folders that are moved to the top; the agent may have guessed some."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._number = 0

    def take(self) -> str:
        while True:
            self._number += 1
            name = f".removing-{self._number}"
            try:
                os.stat(name, dir_fd=self._top, follow_symlinks=False)
            except FileNotFoundError:
                return name


def _remove_entry(name: str, parent: int, names: _UnusedNames, *, is_folder: bool) -> None:
    """Remove an entry of the top folder; the folders in it become entries of the top folder."""
    with suppress(FileNotFoundError):
        if not is_folder:
            os.unlink(name, dir_fd=parent)
            return
        inner = _open_folder(name, parent)
        try:
            for child, child_is_folder in _entries(inner):
                if child_is_folder:
                    # Moving a folder changes its "..", so its own mode must allow writing.
                    os.close(_open_folder(child, inner))
                    os.rename(child, names.take(), src_dir_fd=inner, dst_dir_fd=parent)
                else:
                    os.unlink(child, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=parent)


def _entries(folder: int) -> list[tuple[str, bool]]:
    """Names in an open folder, and whether each is a folder itself (a link to one is not)."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _open_folder(name: str, parent: int) -> int:
    """Open a folder after making it readable, writable and searchable for us, without ever following a link."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        # By this path, since fchmod refuses such a handle, and a second look by name could meet a link.
        entry = Path(f"/proc/self/fd/{handle}")
        entry.chmod(0o700)
        return os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
