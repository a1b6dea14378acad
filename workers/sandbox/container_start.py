"""What a container runs first: sees that its walls stand, writes the files, and becomes the command server.

The worker sends it the server's program, as the image holds nothing of ours. Any Python from 3.8 on.

    python3 -c THIS

Reads a length (4 bytes, big endian) and JSON from standard input; then the server serves there.
"""

from __future__ import annotations

import json
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

CGROUPS = "/sys/fs/cgroup"
MEMORY_FILES = (CGROUPS + "/memory.max", CGROUPS + "/memory/memory.limit_in_bytes")
ROOTLESS = " (rootless engines need control groups v2 that are delegated to them)"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 38, 22, 2
PROCESSES_FILES = (CGROUPS + "/pids.max", CGROUPS + "/pids/pids.max")


def read_exactly(num_bytes: int) -> bytes:
    """Ends the container when the worker has gone."""
    parts = []
    while num_bytes:
        part = os.read(0, min(num_bytes, 1 << 20))
        if not part:
            sys.exit("the worker has gone")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def missing_walls(memory_bytes: int, num_processes: int) -> str | None:
    """What the engine was asked for and did not do, in words; None = all is there."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    if int(status["CapBnd"], 16) or int(status["CapEff"], 16):
        return "capabilities are left"
    if int(status["NoNewPrivs"]) != 1:
        return "programs may gain privileges"
    if int(status["Seccomp"]) != 2:
        return "system calls are not filtered"
    if os.getuid() == 0:
        return "commands would run as root"
    if not at_most(MEMORY_FILES, memory_bytes):
        return "there is no limit of memory" + ROOTLESS
    if not at_most(PROCESSES_FILES, num_processes):
        return "there is no limit of processes" + ROOTLESS
    return None


def missing_isolation() -> str | None:
    """The same where the runtime is told on its command line, and may have other defaults or an own configuration."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/net/dev") as file:
        devices = [line.split(":")[0].strip() for line in file if ":" in line]
    if os.getpid() != 1:
        return "other processes are in sight"
    if devices != ["lo"]:
        return "there is a network: " + ", ".join(devices)
    if int(status["CapEff"], 16):
        return "capabilities are left"
    if int(status["NoNewPrivs"]) != 1:
        return "programs may gain privileges"
    if os.getuid() == 0:
        return "commands would run as root: start the fleet as an ordinary user"
    return None


def filter_calls(program: bytes) -> None:
    """Refuse system calls from here on, in all that this process starts. Raises OSError."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(Program(len(program) // 8, program)), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "cannot filter system calls: " + os.strerror(ctypes.get_errno()))


def at_most(names: tuple[str, ...], limit: int) -> bool:
    """Whether one of the files, which the kernel writes, holds a number that is no larger."""
    for name in names:
        try:
            with open(name) as file:
                return int(file.read()) <= limit
        except (OSError, ValueError):
            continue
    return False


def write(files: dict[str, str]) -> None:
    """Relative path -> text, below the working folder, which is empty."""
    for name, text in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "x", encoding="utf-8", newline="") as file:
            file.write(text)


def prepare(given: dict[str, Any]) -> None:
    """What an engine would do from its options."""
    for name in list(os.environ):
        if name.startswith(("APPTAINER", "SINGULARITY")):
            del os.environ[name]
    os.environ.update(given["environment"])
    for folder in given["made"]:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if given["filter"] is not None:
        import base64

        filter_calls(base64.b64decode(given["filter"]))


def refuse(why: str) -> NoReturn:
    """Say it on standard error."""
    sys.stderr.write(why + "\n")
    sys.exit(3)


def main() -> NoReturn:
    """Ends with exit code 3 and one line on standard error where commands are not to run."""
    (length,) = struct.unpack(">I", read_exactly(4))
    given = json.loads(read_exactly(length))
    if given["walls"] is not None:
        missing = missing_walls(**given["walls"])
        if missing is not None:
            refuse("the engine did not apply what was asked for: " + missing)
    if given.get("is_alone"):
        missing = missing_isolation()
        if missing is not None:
            refuse("the walls do not stand: " + missing)
        prepare(given)
    for folder in given["folders"]:
        if not os.access(folder, os.W_OK):
            refuse(folder + " can't be written: Podman keeps the mode of the image's own folder, so make it 1777 there")
    os.chdir(given["folders"][0])
    try:
        write(given["files"])
    except OSError as error:
        refuse("cannot write the sandbox's files: %s" % error)
    server: dict[str, Any] = {"__name__": "command_server"}
    exec(compile(given["server"], "command_server.py", "exec"), server)
    sys.exit(server["main"](["0", "1", given["config"]]))


if __name__ == "__main__":
    main()
