"""Engines that `rollmill engine serve` keeps alive, for tests that kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import text

from common.db import engines
from common.db.session import Database
from deploy.ports import free_port
from deploy.procfs import PROC, all_stats
from tests.unit.workers.waiting import until
from tests.vllm.gate import Gate
from tests.vllm.playing import Trainee
from tests.vllm.serving import RUN, START_TIMEOUT_S

NUM_ENGINES = 2


@dataclass(kw_only=True)
class Served:
    """An engine that `rollmill engine serve` keeps alive, and the gate under whose URL the run knows it."""

    command: subprocess.Popen[bytes]
    address: str
    gate: Gate
    log_file: Path
    """Of vLLM."""
    command_log: Path
    """Of `engine serve`."""

    @property
    def server(self) -> int:
        """Pid of the API server, which leads the group."""
        (pid,) = [stat.pid for stat in all_stats() if stat.ppid == self.command.pid]
        return pid

    def core(self) -> int:
        """Pid of the process that computes."""
        (pid,) = [
            stat.pid
            for stat in all_stats()
            if stat.pgrp == self.server and b"EngineCore" in (PROC / str(stat.pid) / "cmdline").read_bytes()
        ]
        return pid

    def kill(self) -> None:
        """SIGKILL the server and all that it has."""
        os.killpg(self.server, signal.SIGKILL)


@asynccontextmanager
async def serving_behind_gates(
    trainee: Trainee, database_url: str, model: Path, folder: Path
) -> AsyncIterator[list[Served]]:
    """Several engines for the trainee's run, up at the start of the block and gone after it."""
    with _commands(model, database_url, folder) as started:
        async with AsyncExitStack() as stack:
            found = []
            for command, port in started:
                address = f"http://127.0.0.1:{port}"
                gate = await stack.enter_async_context(Gate(address))
                await until(lambda url=address: _is_registered(trainee.database, url), within_s=START_TIMEOUT_S)  # type: ignore[misc]
                with trainee.database.begin() as conn:
                    # All go through the gate. The command's own row stays: without it, it would end.
                    conn.execute(text("UPDATE engine SET run_id = NULL WHERE url = :url"), {"url": address})
                    engines.register(conn, gate.url, run_id=trainee.run.id)
                (log_file,) = (folder / "data" / "engines" / str(port)).rglob("engine.log")
                found.append(
                    Served(
                        command=command,
                        address=address,
                        gate=gate,
                        log_file=log_file,
                        command_log=_command_log(folder, port),
                    )
                )
            yield found


@contextmanager
def _commands(model: Path, database_url: str, folder: Path) -> Iterator[list[tuple[subprocess.Popen[bytes], int]]]:
    """`rollmill engine serve`, several times, with the ports of what they serve."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    started: list[tuple[subprocess.Popen[bytes], int]] = []
    try:
        for _ in range(NUM_ENGINES):
            port = free_port()
            command = [sys.executable, "-m", "deploy.cli", "engine", "serve", str(model), "--run", RUN]
            with _command_log(folder, port).open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--port", str(port), "--drain-seconds", "0", "--data-dir", str(folder / "data")],
                    env={**environment, "ROLLMILL_DATABASE_URL": database_url},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            started.append((process, port))
        yield started
    finally:
        for process, _ in started:
            process.terminate()
        for process, _ in started:
            process.wait(60)


def _command_log(folder: Path, port: int) -> Path:
    return folder / f"serve-{port}.log"


def _is_registered(database: Database, url: str) -> bool:
    with database.begin() as conn:
        return url in {row.url for row in engines.status(conn)}
