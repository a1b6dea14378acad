"""What the command server does itself when `workers.evaluator` asks: copy files out and in, start a program, no shell.

No process of an agent lives while files are copied. The server stands in the sandbox's folder.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import struct
import time

from workers.sandbox.inside.command import Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from workers.sandbox.command_server import Server

MAX_DEPTH = 16
MAX_ENTRIES = 200_000
MAX_NAME_LENGTH = 1000
"""Of a file's whole path: patterns take their time with long ones."""
COLLECT_S = 30.0
"""Well below the worker's patience, which would make a failure of infrastructure out of an agent's many files."""
NOT_STARTED = 126
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Collection:
    """Files that were taken, and how many were left out for which reason."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._wanted = re.compile(given["wanted"])
        self._refused = re.compile(given["refused"])
        self.left_out: dict[str, int] = {}
        self.num_files = 0
        self.num_bytes = 0
        self.frames: list[bytes] = []

    def leave_out(self, reason: str) -> None:
        """Count a file that does not come along."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def search(self, deadline: float) -> None:
        """Take what is wanted below the working folder, until `deadline` of the monotonic clock."""
        folders, num_entries = [("", 0)], 0
        while folders:
            folder, depth = folders.pop()
            try:
                with os.scandir(folder or ".") as entries:
                    inside = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
            except OSError:
                self.leave_out("unreadable")
                continue
            for name, is_folder in inside:
                if time.monotonic() > deadline:
                    self.leave_out("time")
                    return
                num_entries += 1
                path = folder + name
                if num_entries > MAX_ENTRIES or (is_folder and (depth >= MAX_DEPTH or len(path) >= MAX_NAME_LENGTH)):
                    self.leave_out("too_deep" if is_folder else "too_many")
                elif is_folder:
                    folders.append((path + "/", depth + 1))
                else:
                    try:
                        self.offer(path)
                    except OSError:
                        self.leave_out("unreadable")

    def offer(self, name: str) -> None:
        """Take a file that is wanted, if it may come along."""
        if len(name) > MAX_NAME_LENGTH:
            self.leave_out("name")
        elif self._wanted.fullmatch(name.encode(errors="replace").decode()):
            reason = self._take(name)
            if reason is not None:
                self.leave_out(reason)

    def _take(self, name: str) -> str | None:
        if self.num_files >= self._given["num_files"]:
            return "too_many"
        if not name.isprintable() or "\\" in name:
            return "name"
        if self._refused.fullmatch(name):
            return "refused"
        kind = os.lstat(name).st_mode
        if not stat.S_ISREG(kind):
            return "link" if stat.S_ISLNK(kind) else "special"
        fd = os.open(name, _OPEN)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                return "hard_link"
            room = min(self._given["file_bytes"], self._given["total_bytes"] - self.num_bytes)
            if status.st_size > room:
                return "too_large"
            content = file.read(room + 1)
        if len(content) > room:
            return "too_large"
        self.num_files += 1
        self.num_bytes += len(content)
        encoded = name.encode()
        self.frames += [struct.pack(">II", len(encoded), len(content)), encoded, content]
        return None


def _end_all(server: Server) -> None:
    server.python.give_up()
    server.end_processes(lambda *_: None)


def collect(server: Server, given: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """End every process, then copy out the plain files that are wanted, in the order of their names."""
    _end_all(server)
    found = Collection(given)
    found.search(time.monotonic() + COLLECT_S)
    return {"num_files": found.num_files, "left_out": found.left_out}, b"".join(found.frames)


def put(server: Server, given: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Make a folder that was not there, with these files: path -> base64. What can't be made is an error in words."""
    _end_all(server)
    top = given["folder"]
    try:
        os.mkdir(top)
        for name in given["folders"]:
            os.makedirs(os.path.join(top, name), exist_ok=True)
        for name, content in given["files"].items():
            path = os.path.join(top, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with open(fd, "wb") as file:
                file.write(base64.b64decode(content))
    except OSError as error:
        return {"error": error.strerror}, b""
    return {"error": None}, b""


def start(server: Server, given: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Run a program, not by a shell and with nothing of an earlier command's; the reply is that of a command.

    Its input, at most as much as a pipe holds, can be read once. A program that is missing where agents can't write
    is told as such: whoever asked for it is wrong.
    """
    if _is_missing(given["argv"][0]):
        return {"missing": given["argv"][0]}, b""
    fds: list[int] = []
    try:
        fds += os.pipe()
        os.set_blocking(fds[1], False)
        os.write(fds[1], base64.b64decode(given["input"]))
        os.close(fds.pop(1))
        fds += os.pipe()
        fds.append(os.open("/dev/null", os.O_WRONLY))
        cwd, home = server.path_below(given["cwd"]), server.path_below(given["home"])
        child = os.fork()
    except OSError as error:
        for fd in fds:
            os.close(fd)
        said = f"cannot start the program: {error.strerror}\n".encode()
        return {"exit_code": NOT_STARTED, "limit": None, "num_bytes": len(said)}, said
    if child == 0:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": home, "TMPDIR": cwd}
        errors_fd = fds[2] if given["joins_errors"] else fds[3]
        server.become(given["argv"], environment, cwd=cwd, fds=(fds[0], fds[2], errors_fd))
    for fd in (fds[0], fds[2], fds[3]):
        os.close(fd)
    try:
        return Command(server, child, fds[1], given).run()
    finally:
        os.close(fds[1])


def _is_missing(program: str) -> bool:
    if "/" in program:
        return program.startswith("/") and not os.path.exists(program)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return not any(os.access(os.path.join(folder, program), os.X_OK) for folder in folders)


CALLS = {"collect": collect, "put": put, "start": start}
