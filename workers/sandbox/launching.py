"""What all kinds of walls do alike to start a command server: its program, its configuration, files by number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from workers.sandbox.protocol import Limits
from workers.sandbox.server_text import server_text

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PYTHON_PATH = "/usr/bin:/usr/local/bin"
"""Where Python for the command server is looked for: in folders that every user and every sandbox can read."""
MAX_REMARKS_BYTES = 4096
COMPILE_TIMEOUT_S = 10.0
_COMPILE = """
import importlib.util, marshal, sys
code = compile(sys.stdin.buffer.read(), "command_server.py", "exec")
sys.stdout.buffer.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


def server_python() -> str | None:
    """The system's Python; None = there is none."""
    return shutil.which("python3", path=PYTHON_PATH)


@cache
def server_program() -> bytes:
    """The program as the system's Python has compiled it, which saves that at each start; the text where it can't."""
    python = server_python()
    if python is None:
        return server_text()
    command = [python, "-I", "-S", "-c", _COMPILE]
    try:
        done = subprocess.run(command, input=server_text(), capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return server_text()
    return done.stdout


def server_config(
    limits: Limits,
    *,
    state_folder: str | None,
    disks: Sequence[str],
    kernel_processes: int,
    counts_files: bool = False,
    lend: tuple[int, int | str] | None = None,
) -> str:
    """As the server reads it. `state_folder` None = it makes one.

    `disks`: a folder of each file system that is the sandbox's own. `kernel_processes`: how many processes the
    kernel lets the commands' user have; 0 = as many as it likes. `counts_files`: whether the server must limit the
    number of files, since the file systems do not. `lend`: the port that the worker's proxy is to answer on in the
    sandbox, and the way by which the worker gets that socket: a file's number, or a path.
    """
    numbers = ("memory_bytes", "address_bytes", "num_processes", "cpu_s", "file_bytes", "num_files")
    chosen = {name: getattr(limits, name) for name in numbers}
    chosen["kernel_processes"] = kernel_processes
    chosen["num_inodes"] = limits.num_inodes if counts_files else 0
    return json.dumps({"limits": chosen, "disks": list(disks), "state_folder": state_folder, "lend": lend})


def task_files(folder: Path) -> dict[str, str]:
    """Relative path -> text of what INIT wrote. RUN alone has touched the folder since: it holds no links."""
    return {
        str(file.relative_to(folder)): file.read_bytes().decode()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


class Remarks:
    """What a sandbox's processes say about themselves, in a file without a name."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("remarks")

    def last(self) -> str:
        """The last line; empty when they said nothing."""
        with suppress(OSError):
            size = os.fstat(self.fd).st_size
            text = os.pread(self.fd, MAX_REMARKS_BYTES, max(0, size - MAX_REMARKS_BYTES))
            return text.decode(errors="replace").strip().rpartition("\n")[2]
        return ""

    def __del__(self) -> None:
        os.close(self.fd)


def memory_file(stack: ExitStack, content: bytes) -> int:
    """A file without a name, closed by the stack."""
    handle = os.memfd_create("sandbox")
    stack.callback(os.close, handle)
    os.write(handle, content)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
