"""View, write and replace in files of the sandbox's folder. A process of its own does each, with the commands' limits.

No part of a path may be a link: what a path leads to is decided by the kernel as it opens it, not before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FILE_BYTES = 1 << 20
MAX_SHOWN_BYTES = 32_000
"""Of one view, numbers of lines included."""
MAX_LINE_CHARS = 2000
MAX_NAMES = 500
_OPENAT2 = 437
"""On every machine."""
_RESOLVE = 0x01 | 0x04 | 0x08
"""No other file system, no links of any kind, nothing above the folder (RESOLVE_NO_XDEV, _NO_SYMLINKS, _BENEATH)."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """A request that makes no sense, in words for the agent."""


class FileTools:
    """The tools for one folder."""

    def __init__(self, home_fd: int, home_path: str) -> None:
        self._home = home_fd
        self._home_path = home_path

    def answer(self, request: dict[str, Any]) -> tuple[int, str]:
        """Exit code and what the agent is told."""
        tools = {"view": self._view, "write": self._write, "replace": self._replace}
        path = request["path"]
        try:
            return 0, tools[request["tool"]](path, self._parts(path), request)
        except Refused as error:
            return 1, "%s: %s" % (path, error)
        except OSError as error:
            why = "a link, or below one" if error.errno == errno.ELOOP else error.strerror or str(error)
            return 1, "%s: %s" % (path, why.lower())

    def _parts(self, path: str) -> list[bytes]:
        if path.startswith("/"):
            if path != self._home_path and not path.startswith(self._home_path.rstrip("/") + "/"):
                raise Refused("must lie in %s" % self._home_path)
            path = path[len(self._home_path) :]
        try:
            parts = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
        except ValueError:
            raise Refused("is no name that a file can have") from None
        if b".." in parts:
            raise Refused("must not have .. in it")
        if any(b"\0" in part for part in parts):
            raise Refused("is no name that a file can have")
        return parts

    def _view(self, path: str, parts: list[bytes], request: dict[str, Any]) -> str:
        handle = open_beneath(self._home, parts, _READ)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            return _listing(handle)
        lines = _text(handle).split("\n")
        if lines[-1] == "":
            lines.pop()
        first, last = request["first_line"] or 1, request["last_line"] or len(lines)
        if not 1 <= first <= max(1, len(lines)) or last < first - (not lines):
            raise Refused("has lines 1 to %d, asked for were %d to %d" % (len(lines), first, last))
        return _numbered(lines, first, min(last, len(lines)))

    def _write(self, path: str, parts: list[bytes], request: dict[str, Any]) -> str:
        content = request["text"].encode("utf-8", "replace")
        self._put(parts, content)
        return "wrote %d bytes to %s" % (len(content), path)

    def _replace(self, path: str, parts: list[bytes], request: dict[str, Any]) -> str:
        old, new = request["old"], request["new"]
        text = _text(open_beneath(self._home, parts, _READ))
        places = _places(text, old) if old else []
        if not places:
            raise Refused("does not hold the old text" if old else "the old text must not be empty")
        if len(places) > 1:
            at = ", ".join(str(text.count("\n", 0, place) + 1) for place in places[:10])
            raise Refused("holds the old text %d times (lines %s): give more of what is around it" % (len(places), at))
        place = places[0]
        self._put(parts, (text[:place] + new + text[place + len(old) :]).encode("utf-8", "replace"))
        return "replaced the text at line %d of %s" % (text.count("\n", 0, place) + 1, path)

    def _put(self, parts: list[bytes], content: bytes) -> None:
        """Make the whole file or leave it as it was."""
        if not parts:
            raise Refused("is a folder")
        if len(content) > MAX_FILE_BYTES:
            raise Refused("would have %d bytes, the limit is %d" % (len(content), MAX_FILE_BYTES))
        parent = self._parent(parts[:-1])
        try:
            _put(parent, parts[-1], content)
        finally:
            os.close(parent)

    def _parent(self, parts: list[bytes]) -> int:
        """The folder, made where it is missing."""
        for known in range(len(parts), -1, -1):
            try:
                folder = open_beneath(self._home, parts[:known], _FOLDER)
                break
            except FileNotFoundError:
                continue
        for part in parts[known:]:
            os.mkdir(part, 0o755, dir_fd=folder)
            above, folder = folder, os.open(part, _FOLDER, dir_fd=folder)
            os.close(above)
        return folder


def open_beneath(home: int, parts: list[bytes], flags: int) -> int:
    """Open what lies below a folder, through no link. Raises OSError."""
    if not parts:
        return os.open(".", flags, dir_fd=home)
    try:
        return _openat2(home, b"/".join(parts), flags)
    except OSError as error:
        # A kernel before 5.6, one of gVisor's, or a filter that does not know the call.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return open_step_by_step(home, parts, flags)


def _openat2(home: int, path: bytes, flags: int) -> int:
    how = struct.pack("QQQ", flags, 0, _RESOLVE)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    arguments = (ctypes.c_long(home), ctypes.c_char_p(path), ctypes.c_char_p(how), ctypes.c_size_t(len(how)))
    handle: int = call(ctypes.c_long(_OPENAT2), *arguments)
    if handle < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return handle


def open_step_by_step(home: int, parts: list[bytes], flags: int) -> int:
    """The same, folder by folder, none of which may be a link."""
    folder = home
    for part in parts[:-1]:
        step = os.open(part, _FOLDER, dir_fd=folder)
        if folder != home:
            os.close(folder)
        folder = step
    try:
        return os.open(parts[-1], flags, dir_fd=folder)
    finally:
        if folder != home:
            os.close(folder)


def _put(parent: int, name: bytes, content: bytes) -> None:
    mode = 0o644
    try:
        before = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISREG(before.st_mode):
            raise Refused("is no plain file")
        mode = stat.S_IMODE(before.st_mode)
    fresh = b".%d-%s" % (os.getpid(), os.urandom(8).hex().encode())
    handle = os.open(fresh, _NEW, 0o600, dir_fd=parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            os.fchmod(handle, mode)
        os.rename(fresh, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.unlink(fresh, dir_fd=parent)
        raise


def _text(handle: int) -> str:
    """Of a plain file that people can read. Raises Refused."""
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Refused("is no plain file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise Refused("has more than %d bytes: use the shell (sed -n, grep)" % MAX_FILE_BYTES)
    if b"\0" in data:
        raise Refused("is no text: there are zero bytes in it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("is no text: byte %d is not UTF-8" % error.start) from None


def _places(text: str, wanted: str) -> list[int]:
    """Where it stands, overlapping ones too: any of them could be meant."""
    found: list[int] = []
    place = text.find(wanted)
    while place != -1 and len(found) < 1000:
        found.append(place)
        place = text.find(wanted, place + 1)
    return found


def _listing(folder: int) -> str:
    with os.scandir(folder) as entries:
        names = sorted(entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "") for entry in entries)
    more = ["[%d more]" % (len(names) - MAX_NAMES)] if len(names) > MAX_NAMES else []
    return "\n".join(names[:MAX_NAMES] + more)


def _numbered(lines: list[str], first: int, last: int) -> str:
    shown, num_bytes = [], 0
    for number in range(first, last + 1):
        line = lines[number - 1]
        line = line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " [cut]"
        text = "%6d\t%s" % (number, line)
        num_bytes += len(text.encode("utf-8", "replace")) + 1
        if num_bytes > MAX_SHOWN_BYTES:
            break
        shown.append(text)
    end = first + len(shown) - 1
    if (first, end) != (1, len(lines)):
        shown.append("[lines %d to %d of %d]" % (first, end, len(lines)))
    return "\n".join(shown)
