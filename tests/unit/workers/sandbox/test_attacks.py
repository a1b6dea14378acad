"""How an agent would leave its sandbox, or reach what is not its own. Each attack must be stopped, by a check outside.

`docs/sandbox.md` has a row for each. Over 400 lines: in the order of those rows, so that a missing one is seen.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.workers.sandbox import link_race
from tests.unit.workers.sandbox.marked import MARK, running, user_of
from workers.sandbox import seccomp
from workers.sandbox.container_records import DATA_DIR
from workers.sandbox.containers import Containers
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.inside import file_tools
from workers.sandbox.protocol import Backend, ExecResult, Limit, SandboxSession

pytestmark = pytest.mark.attack
SECRET = "postgresql://worker:secret-8261@db"
PYTHON = "/usr/bin/python3"
FUTURE = "from __future__ import annotations\n"

CALL = f"""{PYTHON} - <<'END'
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall(%s)
print("stopped" if result == -1 else "REACH" + "ED", os.strerror(ctypes.get_errno()))
END"""


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the worker's environment, as its database's address is."""
    monkeypatch.setenv("ROLLMILL_DATABASE_URL", SECRET)
    return SECRET


async def attack(session: SandboxSession, command: str, *, timeout_s: float = 20) -> ExecResult:
    """The sandbox must live on, whatever the attack did."""
    result = await session.exec(command, timeout_s=timeout_s)
    assert (await session.exec("echo alive", timeout_s=20)).output == "alive\n"
    return result


def call_number(name: str) -> int:
    own = {name: numbers for name, (numbers, _) in seccomp.ITSELF.items()}
    numbers = {**seccomp.NOT_PERMITTED, **seccomp.NOT_THERE, **own}[name]
    number = numbers[seccomp.ARCHITECTURES[os.uname().machine][1]]
    assert number is not None
    return number


async def test_the_workers_environment(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "env; cat /proc/[0-9]*/environ /proc/*/task/*/environ | tr '\\0' '\\n'")
    assert "PATH=" in result.output
    assert "secret" not in result.output


async def test_processes_of_the_machine(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls -d /proc/[0-9]* | wc -l")
    assert "pytest" not in result.output
    assert str(Path.cwd()) not in result.output
    assert int(result.output.split()[-1]) <= 8


async def test_signals_to_the_worker(walled_session: SandboxSession) -> None:
    bystander = subprocess.Popen(["sleep", "30"])  # noqa: ASYNC220
    try:
        every = f"for pid in {os.getpid()} {bystander.pid} $(seq 2 400); do kill -9 $pid; done 2>/dev/null; kill -9 -1"
        await attack(walled_session, every)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(10)


async def test_memory_of_the_server(walled_session: SandboxSession) -> None:
    script = """
import os
for name in ("mem", "environ", "maps", "fd", "cwd", "root", "oom_score_adj"):
    try:
        path = "/proc/1/" + name
        if name in ("fd",): os.listdir(path)
        elif name in ("cwd", "root"): os.readlink(path)
        else: open(path, "r+b" if name in ("mem", "oom_score_adj") else "rb").read(1)
        print("REACHED", name)
    except OSError as error:
        print("stopped", name)
"""
    result = await attack(walled_session, f"{PYTHON} -c '{script}'")
    assert (result.output.count("stopped"), "REACHED" in result.output) == (7, False), result.output


@pytest.mark.parametrize("name", ["ptrace", "process_vm_writev", "pidfd_getfd", "kcmp"])
async def test_ptrace_and_its_kin(walled_session: SandboxSession, name: str) -> None:
    arguments = {"ptrace": "16, 1, 0, 0", "pidfd_getfd": "os.pidfd_open(1), 3, 0"}.get(name, "1, 1, 0, 0, 0, 0")
    await assert_refused(walled_session, f"{call_number(name)}, {arguments}", "Operation not permitted")


SCHEDULING = {
    "sched_setaffinity": "1, 8, b'\\1' + bytes(7)",
    "sched_setscheduler": "1, 5, bytes(4)",
    "sched_setparam": "1, bytes(4)",
    "sched_setattr": "1, b'\\x30\\0\\0\\0\\5' + bytes(43), 0",
    "setpriority": "0, 1, 19",
    "setpriority of a group": "1, 1, 19",
    "setpriority of a user": "2, 0, 19",
    "ioprio_set": "1, 1, 3 << 13",
    "ioprio_set of a user": "3, 1000, 3 << 13",
}


@pytest.mark.parametrize("name", SCHEDULING)
async def test_starving_the_server(walled_session: SandboxSession, name: str) -> None:
    arguments = f"{call_number(name.split()[0])}, {SCHEDULING[name]}"
    await assert_refused(walled_session, arguments, "Operation not permitted")


async def assert_refused(session: SandboxSession, arguments: str, why: str) -> None:
    assert (await attack(session, CALL % arguments)).output == f"stopped {why}\n"


@pytest.mark.parametrize("name", ["bpf", "perf_event_open", "userfaultfd", "add_key", "keyctl", "open_by_handle_at"])
async def test_reach_into_the_kernel(walled_session: SandboxSession, name: str) -> None:
    await assert_refused(walled_session, f"{call_number(name)}, 0, 0, 0, 0, 0", "Operation not permitted")


@pytest.mark.parametrize("name", ["mount", "unshare", "setns", "pivot_root", "chroot", "fsopen", "move_mount"])
async def test_mounts_and_namespaces(walled_session: SandboxSession, name: str) -> None:
    await assert_refused(walled_session, f"{call_number(name)}, 0x10000000, 0, 0, 0, 0", "Operation not permitted")


@pytest.mark.parametrize("name", ["reboot", "init_module", "kexec_load", "swapon", "settimeofday", "syslog"])
async def test_the_machine_itself(walled_session: SandboxSession, name: str) -> None:
    await assert_refused(walled_session, f"{call_number(name)}, 0, 0, 0, 0, 0", "Operation not permitted")


async def test_io_uring(walled_session: SandboxSession) -> None:
    await assert_refused(walled_session, f"{call_number('io_uring_setup')}, 8, 0", "Function not implemented")


@pytest.mark.parametrize("name", ["memfd_create", "shmget", "semget", "msgget", "mq_open"])
async def test_memory_that_nobody_counts(walled_session: SandboxSession, name: str) -> None:
    await assert_refused(walled_session, f"{call_number(name)}, 0, 0, 0", "Function not implemented")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86-64 has two numberings")
async def test_the_other_numbering_of_calls(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, CALL % f"{0x40000000 + 521}, 16, 1, 0, 0")
    assert "stopped Function not implemented" in result.output or result.exit_code == 128 + signal.SIGSYS
    assert "REACHED" not in result.output


async def test_a_user_namespace_of_its_own(walled_session: SandboxSession) -> None:
    result = await attack(
        walled_session, "unshare -Ur id; unshare -Urm true; nsenter -t 1 -a true; bwrap --bind / / id"
    )
    assert "uid=0" not in result.output
    assert result.exit_code != 0


@contextmanager
def listening(
    family: socket.AddressFamily, address: tuple[str, int] | str
) -> Iterator[tuple[socket.socket, list[int]]]:
    """A server of the machine, and the connections that reached it."""
    reached: list[int] = []
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()
        server.settimeout(0.1)
        done = threading.Event()

        def accept() -> None:
            while not done.is_set():
                try:
                    server.accept()[0].close()
                    reached.append(1)
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server, reached
        finally:
            done.set()
            thread.join(10)


CONNECT = f"{PYTHON} -c 'import socket; s = socket.socket(socket.{{}}); s.settimeout(2); s.connect({{}}); print(1)'"


@pytest.mark.parametrize("service", ["Postgres", "RabbitMQ"])
async def test_loopback_services(session_with_loopback: SandboxSession, service: str) -> None:
    with listening(socket.AF_INET, ("127.0.0.1", 0)) as (server, reached):
        port = server.getsockname()[1]
        own = "localhost" if service == "Postgres" else "127.0.0.1"
        hosts = f'"{own}", "0.0.0.0", "{outward_address()}"'
        script = f"import socket\nfor h in ({hosts}):\n try: socket.create_connection((h, {port}), 2); print(1)\n"
        result = await attack(session_with_loopback, f"{PYTHON} -c '{script} except OSError as e: print(e.errno)'")
        socket.create_connection(("127.0.0.1", port)).close()
        until(lambda: len(reached) == 1)
    assert "1\n" not in result.output.replace("111\n", "").replace("101\n", ""), result.output
    assert len(reached) == 1


def outward_address() -> str:
    """An address of the machine other than the loopback's, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def until(reached: object) -> None:
    assert callable(reached)
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_names_and_other_networks(session_with_loopback: SandboxSession) -> None:
    lookup = f"{PYTHON} -c 'import socket; print(socket.getaddrinfo(\"example.com\", 80))'"
    assert (await attack(session_with_loopback, lookup)).exit_code == 1
    raw = f"{PYTHON} -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'"
    assert (await attack(session_with_loopback, raw)).exit_code == 1
    links = await attack(session_with_loopback, "tail -n +3 /proc/net/dev | cut -d: -f1; ip link add x type dummy")
    assert links.output.split()[0] == "lo"
    assert links.exit_code != 0


async def test_abstract_unix_sockets(walled_session: SandboxSession) -> None:
    name = f"\0rollmill-{os.getpid()}"
    with listening(socket.AF_UNIX, name) as (_, reached):
        result = await attack(walled_session, CONNECT.format("AF_UNIX", f'"\\0{name[1:]}"'))
    assert (result.exit_code, reached) == (1, [])


async def test_unix_sockets_in_folders(walled_session: SandboxSession, tmp_path: Path) -> None:
    with listening(socket.AF_UNIX, str(tmp_path / "s")) as (_, reached):
        result = await attack(walled_session, CONNECT.format("AF_UNIX", f'"{tmp_path}/s"'))
        found = await attack(walled_session, "find / -type s 2>/dev/null")
    assert (result.exit_code, reached, found.output) == (1, [], "")


@pytest.mark.parametrize("family", [40, 17, 38, 29, 31, 16 + 29])
async def test_sockets_of_other_families(walled_session: SandboxSession, family: int) -> None:
    """AF_VSOCK (40) above all: it speaks to the machine's host from every namespace."""
    script = f"import socket; socket.socket({family}, socket.SOCK_STREAM)"
    result = await attack(walled_session, f'{PYTHON} -c "{script}" 2>&1 | tail -1')
    assert "Address family not supported" in result.output


async def test_files_of_the_machine(walled_session: SandboxSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o666)
    (tmp_path / "open").mkdir(mode=0o777)
    paths = f"{secret} /etc/shadow /root /home /var /sys /boot {Path.cwd()} /proc/1/root{secret} /mnt/base"
    result = await attack(walled_session, f"cat {paths}; find / -name 'sandbox*' -path '*sandbox-owners*' 2>/dev/null")
    assert result.exit_code != 0
    assert "secret-8261" not in result.output
    await attack(walled_session, f"echo x > {secret}; touch {tmp_path}/open/x")
    assert (secret.read_text(), os.listdir(tmp_path / "open")) == (SECRET, [])  # noqa: PTH208


async def test_writing_to_the_system(walled_session: SandboxSession) -> None:
    places = "/x /usr/x /usr/bin/x /etc/passwd /dev/x /proc/sys/kernel/core_pattern /proc/sysrq-trigger /.sandbox/x"
    places += (
        " /proc/sys/kernel/msgmnb /proc/sys/kernel/sem /proc/sys/fs/mqueue/msg_max /proc/sys/user/max_inotify_watches"
    )
    result = await attack(walled_session, f"for p in {places}; do (echo x > $p) 2>/dev/null && echo $p; done; :")
    assert result.output == ""
    await attack(
        walled_session, "mount -o remount,rw /; mount -o remount,rw /usr; echo x > /.sandbox/server; rm -rf /usr"
    )
    assert (await attack(walled_session, "env true")).exit_code == 0


async def test_the_files_that_init_made(walled_session: SandboxSession, folders: SandboxFolders) -> None:
    await attack(walled_session, "rm -rf /workspace/* ; ln -s /etc/passwd notes.txt; echo x > made")
    folder = folders.path("7-1")
    assert (folder / "notes.txt").read_text() == "hello\n"
    assert not (folder / "made").exists()


async def test_symlink_races(walled_session: SandboxSession, folders: SandboxFolders, tmp_path: Path) -> None:
    """10,000 changes between a file and a link out of the sandbox, while the worker removes and makes that folder."""
    secret = tmp_path / "secret"
    secret.write_text("kept")
    changes = f"os.symlink('{tmp_path}', 'd'); os.unlink('d'); os.mkdir('d'); os.rmdir('d')"
    script = f"import os\nfor i in range(10000): {changes}"
    racing = asyncio.ensure_future(walled_session.exec(f'{PYTHON} -c "{script}"', timeout_s=60))
    made = 0
    while not racing.done():
        await asyncio.to_thread(folders.create, "8-1", {"d/x": "y"})
        await asyncio.to_thread(folders.destroy, "8-1")
        assert secret.read_text() == "kept"
        made += 1
    assert racing.result().exit_code == 0, racing.result()
    assert made > 0
    assert os.listdir(tmp_path / "sandboxes") == ["7-1"]  # noqa: PTH208


async def test_links_that_the_worker_would_follow(
    walled_session: SandboxSession, folders: SandboxFolders, tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("kept")
    await attack(
        walled_session, f"ln -s {tmp_path} out; ln -s {tmp_path}/victim v; ln {tmp_path}/victim hard; mkfifo p"
    )
    await walled_session.close()
    folders.destroy("7-1")
    assert (tmp_path / "victim").read_text() == "kept"


async def test_links_in_the_way_of_the_file_tools(walled_session: SandboxSession) -> None:
    """10,000 requests in the midst of a process that turns their folder into a link: more than a sandbox lets run."""
    tools = "FileTools(os.open('.', os.O_RDONLY), os.getcwd())"
    script = inspect.getsource(file_tools) + inspect.getsource(link_race).replace(FUTURE, "")
    script += f"\nmain({tools}, open_beneath, open_step_by_step)\n"
    result = await attack(walled_session, f"{PYTHON} - <<'END'\n{script}\nEND", timeout_s=120)
    inside, refused, reached, outside = result.output.strip().split(" ", 3)
    assert (reached, outside) == ("0", "SECRET ['file']"), result
    assert int(inside) + int(refused) == link_race.NUM_TRIES
    assert int(inside) > 0
    assert int(refused) > 0


async def test_git_hooks(walled_session: SandboxSession, folders: SandboxFolders, tmp_path: Path) -> None:
    """A repository whose settings run programs: no process of the worker opens it, and the folder never holds it."""
    config = f"[core]\\n fsmonitor = touch {tmp_path}/ran\\n[diff]\\n external = touch {tmp_path}/ran\\n"
    hook = f"echo 'touch {tmp_path}/ran' > .git/hooks/post-checkout; chmod +x .git/hooks/*"
    await attack(walled_session, f"mkdir -p .git/hooks; printf '{config}' > .git/config; {hook}")
    assert not (folders.path("7-1") / ".git").exists()
    await walled_session.close()
    folders.destroy("7-1")
    assert not (tmp_path / "ran").exists()


async def test_setuid_programs(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "su -c id; sudo -n id; mount; passwd -d agent; newgrp root < /dev/null")
    assert "uid=0" not in result.output
    made = await attack(
        walled_session, "cp /usr/bin/id mine; chmod 6755 mine; ./mine; grep NoNewPrivs /proc/self/status"
    )
    assert "uid=1000" in made.output
    assert "euid" not in made.output
    assert made.output.split()[-1] == "1"


async def test_becoming_another_user(walled_session: SandboxSession) -> None:
    ids = "import os\nfor n in (0, 65432, 65534):\n try: os.setuid(n); print(1)\n except OSError: print('stopped')"
    result = await attack(walled_session, f'{PYTHON} -c "{ids}"; chown 0 notes.txt')
    assert result.output.count("stopped") == 3
    assert result.exit_code == 1


async def test_device_files(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "mknod d b 8 0 || mknod e c 1 1; ls /dev; find /dev -type b")
    assert "Operation not permitted" in result.output
    assert not {"mem", "kmsg", "kvm", "fuse", "sda", "vda", "loop0"} & set(result.output.split())


async def test_capabilities(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "grep -hE '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | cut -f2")
    assert set(result.output.split()) == {"0" * 16}


async def test_typing_into_a_terminal(walled_session: SandboxSession) -> None:
    script = "import fcntl, os\nfd = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)\nfcntl.ioctl(fd, 0x5412, b'x')"
    result = await attack(walled_session, f'{PYTHON} -c "{script}" 2>&1 | tail -1; (: < /dev/tty) 2>&1')
    assert "Operation not permitted" in result.output
    assert result.exit_code != 0


async def test_inherited_files(walled_session: SandboxSession, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = await attack(walled_session, "ls -l /proc/[0-9]*/fd 2>/dev/null; ls /proc/self/fd | wc -l")
    assert str(tmp_path) not in result.output
    assert result.output.split()[-1] == "4"


async def test_host_paths(walled_session: SandboxSession, folders: SandboxFolders) -> None:
    result = await attack(
        walled_session, "cat /proc/self/mountinfo /proc/1/mountinfo /proc/1/cmdline /proc/self/cgroup"
    )
    assert str(folders.root.parent) not in result.output
    assert str(Path.cwd()) not in result.output


async def test_control_groups(walled_session: SandboxSession) -> None:
    mounted = "mkdir -p c && mount -t cgroup -o memory x c"
    result = await attack(walled_session, f"ls /sys/fs/cgroup; {mounted}; test -e c/release_agent && echo REACHED")
    assert "REACHED" not in result.output
    assert result.exit_code != 0


async def test_fork_bomb(walled_session: SandboxSession) -> None:
    result = await attack(walled_session, "bomb() { bomb | bomb & }; bomb; sleep 60", timeout_s=1)
    assert result.timed_out
    started = time.monotonic()
    subprocess.run(["true"], check=True, timeout=10)  # noqa: ASYNC221
    assert time.monotonic() - started < 5


async def test_memory(walled_session: SandboxSession) -> None:
    hog = f"{PYTHON} -c 'x = bytearray(700 << 20); x[::4096] = x[::4096]; import time; time.sleep(30)'"
    result = await attack(walled_session, f"for i in 1 2 3 4; do {hog} & done; wait", timeout_s=60)
    assert (result.limit, result.exit_code) == (Limit.MEMORY, 137)


SHARED = """
import mmap, os, time
fd = os.open("/dev/shm/shared", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(fd, 0, 80 << 20)
for _ in range(100):
    if os.fork() == 0:
        os.setsid()
        maps = [mmap.mmap(fd, 80 << 20, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) for _ in range(4)]
        time.sleep(60)
time.sleep(60)
"""


async def test_memory_that_is_slow_to_count(walled_session: SandboxSession) -> None:
    """32 GB in 100 processes that are one file of 80 MiB: its time ends the command, and not the server's patience."""
    result = await attack(walled_session, f"{PYTHON} - <<'END'{SHARED}END", timeout_s=3)
    assert (result.limit, result.exit_code, result.output) == (Limit.TIME, None, "")


@pytest.mark.parametrize("folder", ["/workspace", "/tmp", "/dev/shm"])
async def test_disk(walled_session: SandboxSession, folder: str) -> None:
    fill = f"cd {folder}; for i in 1 2 3; do head -c 250000000 /dev/zero > big$i || exit 1; done"
    result = await walled_session.exec(fill, timeout_s=60)
    assert (result.limit, result.exit_code) == (Limit.DISK, 1)
    size = await attack(walled_session, f"du -sm {folder}/ | cut -f1; rm -f {folder}/big*")
    assert int(size.output) <= 385


async def test_many_small_files(walled_session: SandboxSession) -> None:
    script = "import os\nfor i in range(200000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))"
    result = await attack(walled_session, f'{PYTHON} -c "{script}" 2>&1 | tail -1', timeout_s=60)
    assert result.limit is Limit.DISK
    made = await attack(walled_session, "find /tmp | wc -l")
    assert int(made.output) <= 150_000


async def test_processes_that_outlive_the_command(walled_session: SandboxSession) -> None:
    hide = f"setsid nohup sh -c 'trap \"\" TERM HUP INT; sleep 50 # {MARK}' > /dev/null 2>&1 & disown; sleep 0.2"
    await attack(walled_session, hide)
    assert running() == []


async def test_a_forged_reply(walled_session: SandboxSession) -> None:
    """A reply on every file that a command has, and on all that it can open of the server."""
    forged = r"""printf '\0\0\0\x2a\0\0\0\0{"id":2,"exit_code":0,"limit":null,"num_bytes":0}'"""
    every = f"for fd in $(seq 0 40); do {forged} >&$fd; {forged} > /proc/1/fd/$fd; done 2>/dev/null; exit 9"
    result = await attack(walled_session, every)
    assert result.exit_code == 9


async def test_the_user_of_the_worker(walled_session: SandboxSession, walled: Backend, folders: SandboxFolders) -> None:
    await attack(walled_session, "true")
    if isinstance(walled, Containers):
        ((found,),) = [walled.engine.ours([f"{DATA_DIR}={folders.root.parent}"])]
        pid = walled.engine._client().inspect_container(found.id)["State"]["Pid"]
    else:
        (owned,) = folders.owners.of("7-1").values()
        assert owned.inner is not None
        pid = owned.inner.pid
    assert user_of(pid) != 0
    assert user_of(pid) == os.geteuid() or os.geteuid() == 0
