"""What commands reach in each mode, and what INIT says where a mode cannot be had."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

from common.config_network import NetworkConfig
from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.sandbox.conftest import HANDLE
from tests.unit.workers.sandbox.service import serving
from workers.init import _network
from workers.sandbox.backend import FolderBackend
from workers.sandbox.container_engine import ContainerEngine
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import Backend, SandboxSession, SandboxSpec

PROXY = SandboxSpec(network=NetworkConfig(mode="proxy", allow=("packages.example.org:443",)))
SERVE = "python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 & for n in $(seq 100); do sleep 0.1; "
SERVE += (
    "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8000/notes.txt\").read())' && break; "
)
SERVE += "done 2>/dev/null"


async def opened(backend: Backend, network: NetworkConfig) -> SandboxSession:
    spec = await asyncio.to_thread(backend.choose, SandboxSpec(network=network))
    assert spec.network == network
    await asyncio.to_thread(backend.create, HANDLE, {"notes.txt": "hello"}, spec)
    return backend.attach(HANDLE, spec)


@pytest.mark.robustness
async def test_without_a_network_there_is_no_ip(walled: Backend) -> None:
    session = await opened(walled, NetworkConfig())
    script = "import socket\nfor family in (2, 10):\n try: socket.socket(family)\n except OSError as e: print(e.errno)"
    result = await session.exec(f"python3 -c '{script}'; python3 -c 'import socket; socket.socketpair()'", timeout_s=20)
    await session.close()
    assert (result.exit_code, result.output) == (0, "97\n97\n")


@pytest.mark.robustness
async def test_a_loopback_of_ones_own(walled: Backend) -> None:
    async with serving() as service:
        session = await opened(walled, NetworkConfig(mode="loopback"))
        assert (await session.exec(SERVE, timeout_s=60)).output == "b'hello'\n"
        direct = f'import socket; socket.create_connection(("127.0.0.1", {service.port}), 5)'
        result = await session.exec(f"env | grep -i proxy; python3 -c '{direct}'", timeout_s=20)
        await session.close()
        assert "Connection refused" in result.output
        assert service.num_connections == 0


FILES_UNDER_WAY = """
import array, errno, os, socket
many = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 250).tobytes()
pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(20)]
try:
    for _ in range(5):
        for one, _ in pairs:
            one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)], socket.MSG_DONTWAIT)
    said = "no limit"
except OSError as error:
    said = errno.errorcode[error.errno]
said
"""


@pytest.fixture
def few_files() -> Iterator[None]:
    """As where nobody raised the limit of open files for the worker."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.robustness
@pytest.mark.usefixtures("few_files")
async def test_files_under_way_in_one_sandbox_keep_no_other_from_its_proxy(bubblewrap: FolderBackend) -> None:
    await asyncio.to_thread(bubblewrap.create, "8-1", {})
    greedy = bubblewrap.attach("8-1")
    assert (await greedy.python(FILES_UNDER_WAY, timeout_s=60)).output == "'ETOOMANYREFS'\n"
    session = await opened(bubblewrap, PROXY.network)
    assert (await session.exec("echo alive; ulimit -n", timeout_s=60)).output == "alive\n1024\n"
    await session.close()
    await greedy.close()


@pytest.mark.robustness
async def test_programs_find_the_proxy(bubblewrap: FolderBackend) -> None:
    async with serving() as service:
        session = await opened(bubblewrap, NetworkConfig(mode="proxy", allow=(f"127.0.0.1:{service.port}",)))
        fetch = "unset no_proxy NO_PROXY; python3 -c 'import urllib.request as u; print(u.urlopen(\"{}\").read())'"
        result = await session.exec(fetch.format(f"http://127.0.0.1:{service.port}/"), timeout_s=60)
        assert result.output == "b'served'\n"
        refused = await session.exec(fetch.format("https://packages.example.org/simple/"), timeout_s=60)
        assert "packages.example.org:443 is not on the list: [sandbox.network] allow of the run" in refused.output
        await session.close()


def test_without_walls_no_network_is_kept_to(limited: FolderBackend) -> None:
    assert limited.choose(SandboxSpec()).network == NetworkConfig()
    with pytest.raises(EpisodeError, match=r'subprocess cannot keep to \[sandbox.network\] mode = "proxy"') as caught:
        limited.choose(PROXY)
    assert caught.value.outcome is Outcome.SANDBOX_FAILED


@pytest.fixture(params=[("tcp://127.0.0.1:1", None, "is elsewhere"), ("unix:///none", "runsc", "gVisor")])
def unfit(request: pytest.FixtureRequest, folders: SandboxFolders) -> Iterator[tuple[Containers, str]]:
    """Engines that cannot have a proxy, and why."""
    url, runtime, why = request.param
    backend = Containers(folders, ContainerEngine(url), image="agent:1", runtime=runtime)
    yield backend, why
    backend.close()


def test_engines_that_cannot_have_a_proxy_say_so(unfit: tuple[Containers, str]) -> None:
    backend, why = unfit
    with pytest.raises(EpisodeError, match=f"cannot be had: .*{why}.*or take bubblewrap") as caught:
        backend.choose(PROXY)
    assert caught.value.outcome is Outcome.SANDBOX_FAILED


@pytest.mark.robustness
@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_init_tries_the_proxy_of_a_container(request: pytest.FixtureRequest, kind: str) -> None:
    backend: Containers = request.getfixturevalue(kind)
    backend._proven.clear()
    backend.create(HANDLE, {}, backend.choose(PROXY))
    assert len(backend._proven) == 1
    assert list(backend.records.root.iterdir()) == []


def test_a_task_says_what_it_reaches_but_for_private_addresses() -> None:
    task = NetworkConfig(mode="proxy", allow=("packages.example.org:443",))
    run = NetworkConfig(mode="loopback")
    assert _network(task, run) is task
    assert _network(None, run) is run
    inward = NetworkConfig(mode="proxy", allow=("10.0.0.1:80",))
    with pytest.raises(EpisodeError, match=r"allows 10.0.0.1:80: private addresses must be in") as caught:
        _network(inward, run)
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)
    assert _network(inward, NetworkConfig(mode="proxy", allow=("10.0.0.1:80", "b.org:1"))) is inward
