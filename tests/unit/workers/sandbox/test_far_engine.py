"""A container engine over TCP, as two nodes with a data folder each see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from common.errors import EpisodeError
from common.settings import Settings
from tests.unit.workers.sandbox.engines import Engine
from workers.sandbox import open_backend
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import SandboxSpec

FILES = {"maple12": "code 34\n"}


@asynccontextmanager
async def over_tcp(path: str) -> AsyncIterator[str]:
    """The Unix socket as a tcp:// URL."""

    writers: list[asyncio.StreamWriter] = []
    served: list[asyncio.Task[object]] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.append(task)
        far_reader, far_writer = await asyncio.open_unix_connection(path)
        writers.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"tcp://{host}:{port}"
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*served, *(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.mark.robustness
async def test_run_on_another_node_starts_what_init_has_proven(docker_engine: Engine, tmp_path: Path) -> None:
    async with over_tcp(docker_engine.client.url.removeprefix("unix://")) as url:
        nodes = [
            Containers(SandboxFolders.below(tmp_path / name), ContainerEngine(url), pull="never") for name in ("a", "b")
        ]
        spec = SandboxSpec(kind="docker", image=docker_engine.agent, endpoint=url)
        await asyncio.to_thread(nodes[0].create, "7-1", FILES, spec)
        assert list((tmp_path / "a/sandboxes").iterdir()) == []
        session = nodes[1].attach("7-1", spec.model_copy(update={"files": FILES}))
        result = await session.exec("cat maple12", timeout_s=30)
        assert (result.exit_code, result.output) == (0, "code 34\n")
        await session.close()
        await asyncio.to_thread(nodes[1].destroy, "7-1")
        for node, name in zip(nodes, ("a", "b"), strict=True):
            assert list((tmp_path / name / "sandboxes").iterdir()) == []
            assert node.records.of("7-1") == []
            await asyncio.to_thread(node.close)
    assert docker_engine.client.ours([f"rollmill.data-dir={tmp_path / 'b'}"]) == []


def test_the_engine_is_the_one_that_init_chose_whatever_the_nodes_own_is(tmp_path: Path) -> None:
    node = open_backend(Settings(data_dir=tmp_path, sandbox="docker", docker_url="unix:///nowhere/sock"))
    spec = SandboxSpec(kind="docker", image="agent:1", endpoint="tcp://127.0.0.1:9")
    with pytest.raises(EpisodeError, match=r"engine at tcp://127\.0\.0\.1:9 does not answer"):
        node.create("7-1", FILES, spec)
