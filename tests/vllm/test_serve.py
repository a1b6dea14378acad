"""`rollmill engine serve` with real vLLM: it registers, comes back after a kill, drains, ends when removed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from common.config import RunConfig
from common.db import engines, runs, versions
from common.db.engines import EngineStatus
from common.db.session import Database
from common.episode import EngineState, FinishReason
from common.errors import SetupError
from common.weight_cache import WeightCache
from common.weights import WeightStore, version_name
from deploy.engine_probe import check_engine, num_requests
from deploy.ports import free_port
from deploy.procfs import all_stats
from tests.unit.workers.waiting import until
from tests.vllm.serving import RUN, START_TIMEOUT_S, publish
from trainer.modelling import load_model
from workers.engine_client import EngineClient
from workers.weight_keeper import WeightKeeper

pytestmark = pytest.mark.long


@pytest.fixture
def service(
    database: Database, database_url: str, tiny: Path, tmp_path: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The engine's URL, and the command that serves it."""
    with database.begin() as conn:
        run = runs.open_run(conn, RunConfig(name=RUN, model=tiny))
        versions.publish(
            conn, run.id, 0, publish(WeightStore(tmp_path / "weights"), 0, load_model(tiny), tokenizer=tiny)
        )
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    command = [sys.executable, "-m", "deploy.cli", "engine", "serve", str(tiny), "--run", RUN, "--port", str(port)]
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path / "data")],
            env={**environment, "ROLLMILL_DATABASE_URL": database_url},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield f"http://127.0.0.1:{port}", process
    if process.poll() is None:
        process.kill()
    process.wait(20)


def children(pid: int) -> list[int]:
    return [stat.pid for stat in all_stats() if stat.ppid == pid]


async def test_serves_restarts_and_drains(
    service: tuple[str, subprocess.Popen[bytes]],
    database: Database,
    client: EngineClient,
    tiny: Path,
    tmp_path: Path,
) -> None:
    url, process = service

    def stored() -> EngineStatus | None:
        with database.begin() as conn:
            return next(iter(engines.status(conn)), None)

    def serves() -> bool:
        assert process.poll() is None, (tmp_path / "serve.log").read_text()
        row = stored()
        return row is not None and row.state is EngineState.SERVING and row.version == 0

    keeping = asyncio.create_task(
        WeightKeeper(database, client, owner="keeper", poll_s=0.2, cache=WeightCache(tmp_path)).run()
    )
    await until(serves, within_s=START_TIMEOUT_S)
    assert await client.weight_version(url) == version_name(RUN, 0)

    await refuses_another_tokenizer(url, tiny, tmp_path / "other")

    (server,) = children(process.pid)
    os.killpg(server, signal.SIGKILL)
    await until(lambda: not serves(), within_s=30)
    await until(serves, within_s=START_TIMEOUT_S)
    assert children(process.pid) != [server]
    assert await client.weight_version(url) == version_name(RUN, 0)

    await answers_what_runs_when_it_is_told_to_stop(url, process, client)
    await until(lambda: process.poll() is not None, within_s=60)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert process.returncode == 0, (tmp_path / "serve.log").read_text()
    assert stored() is None
    said = (tmp_path / "serve.log").read_text()
    for words in (f"engine {url} is up again: vLLM was killed", f"draining engine {url}", f"engine {url} has ended"):
        assert words in said


async def answers_what_runs_when_it_is_told_to_stop(
    url: str, process: subprocess.Popen[bytes], client: EngineClient
) -> None:
    """Returns when SIGTERM is sent, and all requests that were under way have their whole answers."""
    told_to_stop = asyncio.Event()

    async def ask(number: int) -> list[FinishReason]:
        finished = []
        while not told_to_stop.is_set():
            sampled = await client.generate(
                url,
                request_id=uuid4().hex,
                prompt_ids=[5, 20 + number],
                max_tokens=480,
                temperature=2.0,
                stop_ids=(),
                model=None,
                run=RUN,
            )
            finished.append(sampled.finish_reason)
        return finished

    asking = [asyncio.create_task(ask(number)) for number in range(8)]
    while not await asyncio.to_thread(num_requests, url):
        assert not any(task.done() for task in asking)
    process.send_signal(signal.SIGTERM)
    told_to_stop.set()
    finished = [reason for reasons in await asyncio.gather(*asking) for reason in reasons]
    assert set(finished) <= {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_command_that_is_killed_leaves_no_server_behind(
    service: tuple[str, subprocess.Popen[bytes]], database: Database
) -> None:
    """Its server is told to end by the kernel; the engine process that the server has is in the same group."""
    _, process = service

    def registered() -> bool:
        with database.begin() as conn:
            return bool(engines.status(conn))

    await until(registered, within_s=START_TIMEOUT_S)
    (server,) = children(process.pid)
    process.kill()
    await until(lambda: not any(stat.pgrp == server for stat in all_stats()), within_s=30)


async def test_a_server_that_is_removed_ends_and_leaves_nothing_behind(
    service: tuple[str, subprocess.Popen[bytes]], database: Database, tmp_path: Path
) -> None:
    url, process = service

    def removed() -> bool:
        with database.begin() as conn:
            return engines.remove(conn, url)

    await until(removed, within_s=START_TIMEOUT_S)
    (server,) = children(process.pid)
    await until(lambda: process.poll() is not None, within_s=60)
    said = (tmp_path / "serve.log").read_text()
    assert process.returncode == 0, said
    assert f"engine {url} was removed from its run, so it ends" in said
    assert not any(stat.pgrp == server for stat in all_stats())


async def refuses_another_tokenizer(url: str, tiny: Path, other: Path) -> None:
    """The vocabulary has the same size, and other pieces."""
    shutil.copytree(tiny, other)
    text = (other / "tokenizer.json").read_text()
    assert '"add_prefix_space":false' in text.replace(" ", "").replace("\n", "")
    (other / "tokenizer.json").write_text(text.replace('"add_prefix_space": false', '"add_prefix_space": true'))
    await asyncio.to_thread(check_engine, url, model=tiny, served_name="policy")
    with pytest.raises(SetupError, match="another tokenizer"):
        await asyncio.to_thread(check_engine, url, model=other, served_name="policy")
