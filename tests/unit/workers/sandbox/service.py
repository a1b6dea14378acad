"""A service on the machine's loopback that notes what reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Service:
    """Answers every request with `served`, and closes."""

    port: int = 0
    heads: list[str] = field(default_factory=list)
    """Of requests, in order."""
    num_bytes: int = 0
    """That came, heads included."""
    num_connections: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head.decode())
            self.num_bytes += len(head)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nserved")
            writer.write_eof()
            while chunk := await reader.read(1 << 16):
                self.num_bytes += len(chunk)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    server = await asyncio.start_server(service.answer, "127.0.0.1", 0)
    service.port = server.sockets[0].getsockname()[1]
    yield service
    server.close()
    await server.wait_closed()
