"""How an agent with a list of destinations would reach others. `docs/sandbox.md` has a row for each."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence

import pytest

from common.config_network import NetworkConfig
from common.public_address import is_public
from tests.unit.workers.sandbox.conftest import HANDLE
from tests.unit.workers.sandbox.service import Service, serving
from workers.sandbox.egress_proxy import EgressProxy
from workers.sandbox.protocol import Backend, SandboxSession, SandboxSpec

pytestmark = pytest.mark.attack
MAX_SENT, MAX_CONNECTIONS = 1 << 20, 60
ASK = """
import json, socket, sys
def ask(said):
    parts = []
    with socket.create_connection(("127.0.0.1", 3128), 20) as way:
        try:
            way.sendall(said.encode())
            while part := way.recv(65536):
                parts.append(part.decode("latin-1"))
        except OSError as error:
            parts.append(repr(error))
    return "".join(parts)
for said in json.loads(sys.argv[1]):
    print(ask(said).replace("\\r\\n", "|").replace("\\n", ""))
"""
UPLOAD = """
import socket, sys
way = socket.create_connection(("127.0.0.1", 3128), 20)
way.sendall(f"CONNECT 127.0.0.1:{sys.argv[1]} HTTP/1.1\\r\\n\\r\\nPUT / HTTP/1.1\\r\\n\\r\\n".encode())
try:
    for _ in range(64):
        way.sendall(bytes(1 << 18))
    print("ALL SENT", way.recv(100))
except OSError as error:
    print("cut off")
"""


@pytest.fixture
async def listed() -> AsyncIterator[Service]:
    """What the list names."""
    async with serving() as service:
        yield service


@pytest.fixture
async def secret() -> AsyncIterator[Service]:
    """What it does not: the database, say."""
    async with serving() as service:
        yield service


@pytest.fixture
async def proxied(walled: Backend, listed: Service) -> AsyncIterator[SandboxSession]:
    """A sandbox that may reach `listed`."""
    network = NetworkConfig(
        mode="proxy",
        allow=(f"127.0.0.1:{listed.port}",),
        max_sent_bytes=MAX_SENT,
        max_connections=MAX_CONNECTIONS,
    )
    spec = await asyncio.to_thread(walled.choose, SandboxSpec(network=network))
    await asyncio.to_thread(walled.create, HANDLE, {"ask.py": ASK, "upload.py": UPLOAD}, spec)
    session = walled.attach(HANDLE, spec)
    yield session
    await session.close()


async def answers(session: SandboxSession, requests: Sequence[str]) -> list[str]:
    """What the proxy says to each."""
    result = await session.exec(f"python3 ask.py '{json.dumps(requests)}'", timeout_s=60)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def connect(where: str) -> str:
    return f"CONNECT {where} HTTP/1.1\r\n\r\n"


def get(where: str, *fields: str) -> str:
    return "\r\n".join((f"GET http://{where}/a?b=c HTTP/1.1", *fields, "", ""))


async def test_past_the_proxy(proxied: SandboxSession, listed: Service) -> None:
    direct = f"""
import os, socket
for name in list(os.environ):
    if "proxy" in name.lower(): del os.environ[name]
for where in (("127.0.0.1", {listed.port}), ("192.0.2.1", 443), ("localhost", {listed.port})):
    try: socket.create_connection(where, 3); print("REACHED", where)
    except OSError as error: print("stopped")
"""
    result = await proxied.exec(f"python3 - <<'END'{direct}END", timeout_s=30)
    assert result.output == "stopped\n" * 3
    assert listed.num_connections == 0
    assert (await answers(proxied, [get(f"127.0.0.1:{listed.port}")]))[0].endswith("||served")


async def test_the_machine_through_the_proxy(proxied: SandboxSession, secret: Service) -> None:
    hosts = ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "017700000001", "127.1", "0.0.0.0", "0"]
    hosts += ("[::1]", "[::ffff:127.0.0.1]", "[::127.0.0.1]", "127.0.0.1.", "LOCALHOST.", "169.254.169.254", "*")
    asked = [ask(f"{host}:{secret.port}") for host in hosts for ask in (connect, get)]
    said = await answers(proxied, asked)
    assert [line for line in said if not line.startswith("HTTP/1.1 403 ")] == []
    assert "[sandbox.network] allow" in said[0]
    assert f"127.0.0.1:{secret.port}" in said[0]
    assert secret.num_connections == 0


async def test_ports_of_mail(proxied: SandboxSession) -> None:
    said = await answers(proxied, [connect("127.0.0.1:25"), connect("mail.example.org:25")])
    assert [line.split(" (")[0] for line in said] == ["HTTP/1.1 403 Forbidden"] * 2


async def test_another_host_in_the_request(proxied: SandboxSession, listed: Service) -> None:
    where = f"127.0.0.1:{listed.port}"
    asked = [
        get(where, "Host: metadata.internal", "Proxy-Authorization: secret", "Connection: x-own", "X-Own: 1"),
        get(f"user@{where}"),
        f"GET / HTTP/1.1\r\nHost: {where}\r\n\r\n",
        get(where, "Host: a\nHost: b"),
    ]
    said = await answers(proxied, asked)
    assert [line[9:12] for line in said] == ["200", "400", "400", "400"]
    assert listed.heads == [f"GET /a?b=c HTTP/1.1\r\nHost: {where}\r\nConnection: close\r\n\r\n"]


async def test_a_second_request_behind_the_first(proxied: SandboxSession, listed: Service) -> None:
    where = f"127.0.0.1:{listed.port}"
    hidden = f"GET /hidden HTTP/1.1\r\nHost: {where}\r\n\r\n"
    asked = [
        get(where) + hidden,
        get(where, "Content-Length: 2") + "ab" + hidden,
        get(where, "Transfer-Encoding: chunked") + "0\r\n\r\n" + hidden,
        get(where, "Content-Length: 2", "Content-Length: 0") + hidden,
        get(where, "Content-Length: +2") + hidden,
    ]
    said = await answers(proxied, asked)
    assert [line[9:12] for line in said] == ["200", "200", "411", "400", "400"]
    assert len(listed.heads) == 2
    assert listed.num_bytes == sum(map(len, listed.heads)) + 2


async def test_a_huge_upload(proxied: SandboxSession, listed: Service) -> None:
    where = f"127.0.0.1:{listed.port}"
    said = await answers(proxied, [get(where, f"Content-Length: {MAX_SENT + 1}")])
    assert "max_sent_bytes" in said[0]
    result = await proxied.exec(f"python3 upload.py {listed.port}", timeout_s=60)
    assert result.output == "cut off\n"
    assert listed.num_bytes <= MAX_SENT
    assert "max_sent_bytes" in (await answers(proxied, [get(where)]))[0]


async def test_connections_without_end(proxied: SandboxSession, listed: Service) -> None:
    connect = 'socket.create_connection(("127.0.0.1", 3128), 30).close()'
    flood = f"python3 -c 'import socket\nfor _ in range({MAX_CONNECTIONS}): {connect}'"
    assert (await proxied.exec(flood, timeout_s=60)).exit_code == 0
    assert "max_connections" in (await answers(proxied, [get(f"127.0.0.1:{listed.port}")]))[0]
    async with asyncio.timeout(60):
        while "ConnectionRefused" not in (await proxied.exec(flood, timeout_s=60)).output:
            pass
    assert listed.num_connections == 0


async def test_taking_the_proxys_place(proxied: SandboxSession, listed: Service) -> None:
    take = "python3 -c 'import socket; s = socket.socket(); s.setsockopt(1, 15, 1); s.bind((\"127.0.0.1\", 3128))'"
    result = await proxied.exec(f"{take}; kill -9 -1", timeout_s=30)
    assert "Address already in use" in result.output
    left = await proxied.exec("find / -type s 2>/dev/null; ls /.sandbox/proxy 2>/dev/null", timeout_s=30)
    assert left.output == ""
    assert (await answers(proxied, [get(f"127.0.0.1:{listed.port}")]))[0].endswith("||served")


async def test_names_that_lead_inward(secret: Service) -> None:
    """A name server of the agent's: it gives a public address first, and one of the node's when it is asked again."""
    asked: list[str] = []

    async def resolve(host: str) -> list[str]:
        asked.append(host)
        return {"inward.example.org": ["127.0.0.1", "::ffff:127.0.0.1", "fd00::1"], "rebound.example.org": []}[host]

    policy = NetworkConfig(mode="proxy", allow=(f"*.example.org:{secret.port}",))
    proxy = EgressProxy(policy, handle="7-1", resolve=resolve)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    proxy.serve(listener)
    for host, status in (("inward.example.org", b"403"), ("example.org", b"403"), ("rebound.example.org", b"403")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(connect(f"{host}:{secret.port}").encode())
        said = await reader.read()
        assert said.split()[1] == status, said
        assert b"127.0.0.1" not in said
        writer.close()
    await proxy.close()
    assert asked == ["inward.example.org", "rebound.example.org"]
    assert secret.num_connections == 0


@pytest.mark.parametrize(
    ("address", "is_safe"),
    [
        *(("1.1.1.1", True), ("2606:4700::1111", True), ("::ffff:1.1.1.1", True), ("64:ff9b::101:101", True)),
        *(("127.0.0.1", False), ("10.1.2.3", False), ("100.100.100.200", False), ("169.254.169.254", False)),
        *(("168.63.129.16", False), ("192.0.0.192", False), ("0.0.0.0", False), ("224.0.0.1", False)),
        *(("255.255.255.255", False), ("::1", False), ("::", False), ("::ffff:10.0.0.1", False)),
        *(("fe80::1%eth0", False), ("fd00:ec2::254", False), ("64:ff9b::a9fe:a9fe", False), ("::7f00:1", False)),
        *(("2002:7f00:1::", False), ("2001:0:1:1:0:0:80ff:fffe", False), ("fec0::1", False), ("ff02::1", False)),
        *(("::ffff:0:7f00:1", False), ("::ffff:0:a9fe:a9fe", False), ("::ffff:0:101:101", True)),
        ("64:ff9b:1::a9fe:a9fe", False),
    ],
)
def test_addresses_that_are_not_public(address: str, is_safe: bool) -> None:
    assert is_public(address) is is_safe
