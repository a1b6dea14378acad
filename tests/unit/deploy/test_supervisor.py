"""Processes under supervision: started in order, started again, given up, stopped, and never left behind.

Over 400 lines: real processes that end in one way each, side by side, so that a missing way is seen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from common.errors import SetupError
from deploy.crash_policy import CrashPolicy
from deploy.folder import DataFolder
from deploy.leftovers import end_leftovers, mark_of
from deploy.process import READ_BYTES, Process, ProcessSpec, Restart
from deploy.procfs import boot_id, read_stat
from deploy.supervisor import State, StopRequested, Supervisor

QUICK = CrashPolicy(max_in_row=3, soon_s=5.0, backoff_s=0.01)
SLEEP = "import time; time.sleep(600)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("armed", flush=True)
time.sleep(600)
"""


def python(name: str, code: str, *arguments: object, **treatment: Any) -> ProcessSpec:
    argv = (sys.executable, "-I", "-S", "-c", code, *map(str, arguments))
    return ProcessSpec(name=name, argv=argv, **treatment)


def says(folder: DataFolder, name: str, line: str) -> Callable[[], bool]:
    return lambda: line in folder.log_file(name).read_text().splitlines()


def lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.is_zombie


def poll_until(supervisor: Supervisor, condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, supervisor.statuses()
        supervisor.poll()
        time.sleep(0.01)


def pid_in(file: Path) -> int:
    """The pid that a test program wrote, once it is there."""
    deadline = time.monotonic() + 10
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no pid in {file}"
        time.sleep(0.01)
    return int(file.read_text())


# A program that starts a child, notes the child's pid, and waits. Argument 2: whether the child gets its own session.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"],
                         start_new_session=sys.argv[2] == "True")
with open(sys.argv[1], "w") as file:
    file.write(f"{child.pid}\\n")
time.sleep(600)
"""


def test_a_killed_process_is_started_again(folder: DataFolder) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("sleeper", SLEEP))
        first = supervisor.statuses()[0].pid
        os.kill(first, signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 1)
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.UP)
        status = supervisor.statuses()[0]
        assert status.pid != first
        assert lives(status.pid)
        assert status.last_exit == "was killed by SIGKILL"
        assert json.loads((folder.run / "sleeper.pid").read_text())["pid"] == status.pid
    assert not lives(status.pid)
    assert supervisor.statuses()[0].state is State.STOPPED


def test_a_worker_that_ends_without_error_is_started_again(folder: DataFolder) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("worker", "pass"))
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 1)


def test_an_exit_code_that_hides_the_cause_is_told_with_what_the_log_says(folder: DataFolder) -> None:
    code = "print('INFO the engine has died'); raise SystemExit(0)"
    causes = {"engine has died": "after its engine had died", "the moon": "for the moon"}
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.launch(python("server", code, causes=causes))
        poll_until(supervisor, lambda: supervisor.statuses()[0].last_exit is not None)
        assert supervisor.statuses()[0].last_exit == "ended with exit code 0 after its engine had died"


# A program whose engine dies with requests in it: it says so, then a traceback for each of them, and is deaf.
DEAF = """
import sys, time
print("INFO the engine has died")
for number in range(20_000):
    print(f"ERROR request {number}: a line of a traceback, which is longer than what it says")
open(sys.argv[1], "w").close()
sys.stdout.flush()
time.sleep(600)
"""


def test_the_cause_is_found_before_all_that_followed_it_and_a_kill_of_ours_is_told_as_ours(
    folder: DataFolder, tmp_path: Path
) -> None:
    deaf = tmp_path / "deaf"
    works = [True]
    causes = {"engine has died": "after its engine had died", "the moon": "for the moon"}
    spec = python("server", DEAF, deaf, ready=lambda: works.pop() if works else False, lost_after_s=0.2, causes=causes)
    with Supervisor(folder, crash_policy=CrashPolicy(soon_s=0.0, backoff_s=600)) as supervisor:
        supervisor.launch(spec)
        poll_until(supervisor, deaf.exists, timeout_s=60)
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.WAITING, timeout_s=60)
        assert folder.log_file("server").stat().st_size > 1 << 20
        said = supervisor.statuses()[0].last_exit
    assert said == "did not answer for 0.2 s after its engine had died, and was killed"


@pytest.mark.parametrize("num_before", [0, READ_BYTES - 10, READ_BYTES + 1])
def test_words_are_found_wherever_the_log_is_cut_and_not_before_its_start(folder: DataFolder, num_before: int) -> None:
    code = f"import sys; sys.stdout.write('x' * {num_before} + 'engine has died' + 'y' * 100_000); sys.exit(3)"
    folder.log_file("server").write_text("the moon\n")
    causes = {"the moon": "for the moon", "engine has died": "after its engine had died"}
    process = Process(python("server", code, causes=causes), log_file=folder.log_file("server"), mark="TEST=1")
    deadline = time.monotonic() + 60
    while (exit_code := process.exit_code()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.explain_end(exit_code) == "ended with exit code 3 after its engine had died"


def test_a_process_that_has_finished_is_left_alone(folder: DataFolder) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("once", "pass", restart=Restart.ON_FAILURE))
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.FINISHED)
        supervisor.poll()
        assert supervisor.statuses()[0].restarts == 0
    assert supervisor.statuses()[0].state is State.FINISHED


def test_a_crash_loop_ends_with_the_last_log_lines(folder: DataFolder) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("bystander", SLEEP))
        # It must not end before it was seen to run, which would be a start that failed.
        supervisor.start(python("broken", "import time; time.sleep(1); raise SystemExit('no such model: x')"))
        with pytest.raises(SetupError) as raised:
            poll_until(supervisor, lambda: False)
        bystander, broken = supervisor.statuses()
    lines = str(raised.value).splitlines()
    assert lines[0] == f"broken ended with exit code 1, 3 times in a row; its log: {folder.log_file('broken')}"
    assert lines[1:] == ["    no such model: x"]
    assert broken.restarts == 2
    assert not lives(bystander.pid)
    assert folder.log_file("broken").read_text().count("start of broken") == 3


def test_crashes_far_apart_do_not_add_up(folder: DataFolder) -> None:
    policy = CrashPolicy(max_in_row=2, soon_s=0.0, failed_soon_s=0.0, backoff_s=0.01)
    with Supervisor(folder, crash_policy=policy) as supervisor:
        supervisor.start(python("flaky", "raise SystemExit(1)"))
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 4)


# A program that takes long to get anywhere, says so with its pid if it is to, and ends at once.
LOAD_AND_FAIL = """
import os, sys, time
time.sleep(2)
if sys.argv[2] == "True":
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(0.2)
sys.exit(1)
"""


@pytest.mark.parametrize("gets_ready", [False, True])
def test_what_a_process_takes_to_be_ready_is_not_lived(folder: DataFolder, tmp_path: Path, gets_ready: bool) -> None:
    policy = CrashPolicy(max_in_row=2, failed_soon_s=1.5, backoff_s=0.01)
    file = tmp_path / "pid"
    with Supervisor(folder, crash_policy=policy) as supervisor:

        def ready() -> bool:
            return file.exists() and file.read_text() == str(supervisor.statuses()[0].pid)

        supervisor.launch(python("server", LOAD_AND_FAIL, file, gets_ready, ready=ready))
        with pytest.raises(SetupError, match=r"^server ended with exit code 1, 2 times in a row"):
            poll_until(supervisor, lambda: False, timeout_s=60)


def test_what_a_person_must_mend_ends_all_however_long_it_takes_to_find_out(
    folder: DataFolder, caplog: pytest.LogCaptureFixture
) -> None:
    policy = CrashPolicy(max_setup_errors=2, soon_s=0.0, failed_soon_s=0.0, backoff_s=0.01)
    code = "import sys; sys.stderr.write('reading\\ntrainer: no such layer: q_prjo\\n'); sys.exit(2)"
    with Supervisor(folder, crash_policy=policy) as supervisor:
        supervisor.start(python("trainer", code))
        with pytest.raises(SetupError, match=r"^trainer ended with exit code 2, 2 times in a row"):
            poll_until(supervisor, lambda: False)
        (status,) = supervisor.statuses()
    assert status.last_end == "ended with exit code 2: trainer: no such layer: q_prjo"
    assert any(f"{status.last_end}; starting" in line for line in caplog.messages)


# A program that ends with an error at its first start, and runs at its second.
FAIL_ONCE = """
import os, sys, time
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    sys.exit("no such file: x")
time.sleep(600)
"""


def test_what_a_process_said_is_of_its_last_end_alone(folder: DataFolder, tmp_path: Path) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.launch(python("server", FAIL_ONCE, tmp_path / "x"))
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 1, timeout_s=60)
        assert supervisor.statuses()[0].last_end == "ended with exit code 1: no such file: x"
        os.kill(supervisor.statuses()[0].pid, signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 2, timeout_s=60)
        assert supervisor.statuses()[0].last_end == "was killed by SIGKILL"


def test_a_process_that_ended_as_it_should_has_no_end_to_tell_of(folder: DataFolder) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("once", "print('all done')", restart=Restart.ON_FAILURE))
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.FINISHED, timeout_s=60)
        assert supervisor.statuses()[0].last_exit == "ended with exit code 0"
        assert supervisor.statuses()[0].last_end is None


def test_a_process_that_ends_before_it_is_ready_is_named_with_its_log(folder: DataFolder) -> None:
    spec = python("server", "print('port taken'); raise SystemExit(3)", ready=lambda: False)
    with Supervisor(folder) as supervisor, pytest.raises(SetupError) as raised:
        supervisor.start(spec)
    assert str(raised.value) == (
        f"server ended with exit code 3 before it was ready; its log: {folder.log_file('server')}\n    port taken"
    )


def test_a_program_that_does_not_exist_is_named(folder: DataFolder) -> None:
    spec = ProcessSpec(name="ghost", argv=("/no/such/program",), ready=lambda: False)
    with Supervisor(folder) as supervisor, pytest.raises(SetupError, match="cannot run /no/such/program"):
        supervisor.start(spec)


def test_a_process_that_is_never_ready_is_an_error_at_its_deadline(folder: DataFolder) -> None:
    spec = python("mute", SLEEP, ready=lambda: False, ready_timeout_s=0.3)
    with Supervisor(folder) as supervisor:
        with pytest.raises(SetupError, match=r"mute was not ready within 0 s"):
            supervisor.start(spec)
        pid = supervisor.statuses()[0].pid
    assert not lives(pid)


def test_a_restarted_process_that_is_never_ready_is_killed_and_tried_again(folder: DataFolder, tmp_path: Path) -> None:
    works = tmp_path / "works"
    works.touch()
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("server", SLEEP, ready=works.exists, ready_timeout_s=0.2))
        works.unlink()
        os.kill(supervisor.statuses()[0].pid, signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.statuses()[0].restarts == 2)
        works.touch()
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.UP)


NOTE_END = """
import signal, sys, time
def end(*_):
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1] + "\\n")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("armed", flush=True)
time.sleep(600)
"""


def test_a_process_that_no_longer_answers_is_killed_and_started_again(folder: DataFolder, tmp_path: Path) -> None:
    """It runs on, deaf: one that is believed stays, the other has to be up again."""
    works = tmp_path / "works"
    works.touch()
    with Supervisor(folder, crash_policy=CrashPolicy(soon_s=0.0, backoff_s=0.01)) as supervisor:
        believed = python("believed", SLEEP, ready=works.exists)
        supervisor.start(believed, python("server", SLEEP, ready=works.exists, lost_after_s=0.5))
        server = supervisor.statuses()[1].pid
        works.unlink()
        poll_until(supervisor, lambda: supervisor.statuses()[1].restarts == 1)
        assert not lives(server)
        assert supervisor.statuses()[1].last_exit == "did not answer for 0.5 s, and was killed"
        assert supervisor.statuses()[1].state is State.STARTING
        works.touch()
        poll_until(supervisor, lambda: supervisor.statuses()[1].state is State.UP)
        asked_again = time.monotonic() + 2.0
        poll_until(supervisor, lambda: time.monotonic() > asked_again)
        assert [status.restarts for status in supervisor.statuses()] == [0, 1]


def test_layers_stop_in_reverse_order(folder: DataFolder, tmp_path: Path) -> None:
    order = tmp_path / "order"

    def noting(name: str) -> ProcessSpec:
        return python(name, NOTE_END, name, order, ready=says(folder, name, "armed"))

    with Supervisor(folder) as supervisor:
        supervisor.start(noting("database"))
        supervisor.start(noting("broker"))
        supervisor.start(noting("worker"))
    assert order.read_text().split() == ["worker", "broker", "database"]
    assert list(folder.run.glob("*.pid")) == []


def test_a_process_that_ignores_the_stop_signal_is_killed_at_its_deadline(folder: DataFolder) -> None:
    spec = python("stubborn", STUBBORN, ready=says(folder, "stubborn", "armed"), stop_timeout_s=0.3)
    with Supervisor(folder) as supervisor:
        supervisor.start(spec)
        pid = supervisor.statuses()[0].pid
        begun = time.monotonic()
    assert 0.3 <= time.monotonic() - begun < 3.0
    assert not lives(pid)


@pytest.mark.parametrize("own_session", [False, True])
def test_grandchildren_end_with_the_supervisor(folder: DataFolder, tmp_path: Path, own_session: bool) -> None:
    with Supervisor(folder) as supervisor:
        supervisor.start(python("parent", PARENT, tmp_path / "pid", own_session))
        grandchild = pid_in(tmp_path / "pid")
        assert lives(grandchild)
    assert not lives(grandchild)


@pytest.mark.parametrize("own_session", [False, True])
def test_what_a_killed_process_left_is_ended_before_its_restart(
    folder: DataFolder, tmp_path: Path, own_session: bool
) -> None:
    with Supervisor(folder, crash_policy=QUICK) as supervisor:
        supervisor.start(python("parent", PARENT, tmp_path / "pid", own_session))
        orphan = pid_in(tmp_path / "pid")
        os.kill(supervisor.statuses()[0].pid, signal.SIGKILL)
        poll_until(supervisor, lambda: supervisor.statuses()[0].state is State.WAITING)
        assert read_stat(orphan) is None


def test_a_signal_asks_to_stop(folder: DataFolder) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Supervisor(folder) as supervisor:
        supervisor.start(python("sleeper", SLEEP))
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested) as raised:
            poll_until(supervisor, lambda: False)
        pid = supervisor.statuses()[0].pid
        assert lives(pid)
    assert raised.value.number is Signals.SIGTERM
    assert not lives(pid)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_during_the_start_asks_to_stop(folder: DataFolder) -> None:
    def never_ready() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with Supervisor(folder) as supervisor, pytest.raises(StopRequested):
        supervisor.start(python("slow", SLEEP, ready=never_ready))


def test_a_second_signal_kills_at_once(folder: DataFolder) -> None:
    spec = python("stubborn", STUBBORN, ready=says(folder, "stubborn", "armed"))
    with Supervisor(folder) as supervisor:
        supervisor.start(spec)
        begun = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert time.monotonic() - begun < 3.0 < spec.stop_timeout_s


SUPERVISOR = """
import sys, time
from pathlib import Path
from deploy.folder import DataFolder
from deploy.process import ProcessSpec
from deploy.supervisor import Supervisor
data_dir, pid_file, parent_code = sys.argv[1:]
with DataFolder(Path(data_dir)) as folder, Supervisor(folder) as supervisor:
    supervisor.start(ProcessSpec(name="parent", argv=(sys.executable, "-I", "-S", "-c", parent_code, pid_file, "True")))
    while True:
        supervisor.poll()
        time.sleep(0.02)
"""


def test_children_die_with_a_killed_supervisor_and_the_next_start_ends_their_offspring(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    data_dir, pid_file = tmp_path / "data", tmp_path / "pid"
    killed = subprocess.Popen([sys.executable, "-c", SUPERVISOR, data_dir, pid_file, PARENT])
    grandchild = pid_in(pid_file)
    record = json.loads((data_dir / "run" / "parent.pid").read_text())
    killed.kill()
    killed.wait()
    wait_until(lambda: not lives(record["pid"]))
    assert lives(grandchild), "it has a session of its own, so only the next start finds it"
    with DataFolder(data_dir) as folder, Supervisor(folder):
        assert not lives(grandchild)
        assert list(folder.run.glob("*.pid")) == []


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(folder: DataFolder) -> None:
    stranger = subprocess.Popen([sys.executable, "-I", "-S", "-c", SLEEP], start_new_session=True)
    stat = read_stat(stranger.pid)
    assert stat is not None
    record = {"name": "old", "pid": stranger.pid, "boot_id": boot_id(), "stop_signal": 15}
    file = folder.run / "old.pid"
    try:
        for wrong in ({"start_ticks": stat.start_ticks - 1}, {"start_ticks": stat.start_ticks, "boot_id": "another"}):
            file.write_text(json.dumps(record | wrong))
            assert end_leftovers(folder.run, mark=mark_of(folder.path)) == 0
            assert stranger.poll() is None
            assert not file.exists()
        file.write_text(json.dumps(record | {"start_ticks": stat.start_ticks}))
        assert end_leftovers(folder.run, mark=mark_of(folder.path)) == 1
        assert stranger.wait(timeout=10) == -signal.SIGTERM
    finally:
        stranger.kill()
        stranger.wait()


def test_a_damaged_pid_file_is_removed(folder: DataFolder) -> None:
    (folder.run / "x.pid").write_text("{")
    with Supervisor(folder):
        assert not (folder.run / "x.pid").exists()


def test_no_secret_is_needed_in_argv_and_logs_begin_with_a_header(folder: DataFolder) -> None:
    code = "import os; print(os.environ['WORD'], flush=True); import time; time.sleep(600)"
    spec = python("speaker", code, env={"WORD": "hunter2"}, ready=says(folder, "speaker", "hunter2"))
    with Supervisor(folder) as supervisor:
        supervisor.start(spec)
        command_line = Path(f"/proc/{supervisor.statuses()[0].pid}/cmdline").read_text()
    assert "hunter2" not in command_line
    header, word = folder.log_file("speaker").read_text().splitlines()
    assert header.startswith("==== 20")
    assert word == "hunter2"
