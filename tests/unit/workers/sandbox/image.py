"""A small image made from this machine's own programs: no registry is needed."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path

PROGRAMS = (
    *("bash", "sh", "env", "cat", "ls", "wc", "head", "tail", "tr", "cut", "seq", "sleep", "true", "false", "echo"),
    *("printf", "mkdir", "rmdir", "rm", "ln", "cp", "mv", "touch", "chmod", "chown", "mkfifo", "mknod", "basename"),
    *("md5sum", "du", "id", "tty", "yes", "nohup", "sort", "find", "grep", "sed", "mount", "umount", "unshare"),
    *("nsenter", "su", "newgrp", "passwd", "setsid", "prlimit", "ip", "stat", "kill", "ps"),
)
PASSWD = b"root:x:0:0::/:/bin/false\nagent:x:1000:1000::/workspace:/bin/bash\n"
_STDLIB_LEFT_OUT = {"test", "idlelib", "tkinter", "lib2to3", "ensurepip", "dist-packages", "site-packages"}


def make(tar: Path, *, with_python: bool = True) -> None:
    """Write a root file system, as `docker import` takes it."""
    names = (*PROGRAMS, *(("python3",) if with_python else ()))
    programs = [
        Path(found).resolve() for name in names if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))
    ]
    with tarfile.open(tar, "w") as image:
        for folder in ("tmp", "etc", "proc", "sys", "dev", "run"):
            _folder(image, folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                image.add(f"/{name}", name, recursive=False)
        _file(image, "etc/passwd", PASSWD)
        libraries = _libraries(programs)
        if with_python:
            libraries |= _add_python(image, programs)
        for path in sorted({*programs, *libraries}):
            image.add(path.resolve(), str(path).lstrip("/"), recursive=False)
        for name in names:
            if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin")) and Path(found).is_symlink():
                link = tarfile.TarInfo(f"usr/bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, str(Path(found).resolve())
                image.addfile(link)


def _add_python(image: tarfile.TarFile, programs: list[Path]) -> set[Path]:
    """The system's standard library, and what its extension modules need."""
    version = next(path.name for path in programs if re.fullmatch(r"python3\.\d+", path.name))
    stdlib = Path("/usr/lib") / version
    if not stdlib.is_dir():
        stdlib = Path(sysconfig.get_path("stdlib"))

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if _STDLIB_LEFT_OUT & set(member.name.split("/")) else member

    image.add(stdlib, str(stdlib).lstrip("/"), filter=wanted)
    return _libraries(list((stdlib / "lib-dynload").glob("*.so")))


def _libraries(programs: list[Path]) -> set[Path]:
    """Files that the programs load, under the names by which they are loaded."""
    shown = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=60, check=False).stdout
    found = (Path(os.path.normpath(name)) for name in re.findall(r"(/\S+) \(0x", shown))
    # In its real folder: an unpacked link to a folder that is not there yet can hold nothing.
    return {path.parent.resolve() / path.name for path in found if path.is_file()}


def _folder(image: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
    image.addfile(entry)


def _file(image: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    image.addfile(entry, io.BytesIO(content))
