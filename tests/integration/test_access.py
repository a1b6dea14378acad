"""The commands that look at a database later: on the data folder's own server, which they start for themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from common.config import TINY_MODELS
from deploy.folder import DataFolder

# In a process of its own: a supervisor takes all children of its process for its own.
MAKE_DATABASE = """
import sys
from pathlib import Path

from common.config import RunConfig
from common.db import runs
from common.db.session import Database, migrate
from deploy.folder import DataFolder
from deploy.postgres import prepare_postgres
from deploy.supervisor import Supervisor

with DataFolder(Path(sys.argv[1])) as folder, Supervisor(folder) as supervisor:
    server = prepare_postgres(folder)
    supervisor.start(server.process)
    database = Database.connect(server.url)
    migrate(database)
    with database.begin() as conn:
        runs.open_run(conn, RunConfig(name="old-run", model=Path("/nowhere"), train={"num_versions": 3}))
    database.dispose()
"""

# A stack as far as those who only ask need it, until its input ends.
BE_UP = """
import sys
from pathlib import Path

from deploy.folder import DataFolder, write_private
from deploy.local import StackAddresses, addresses_file
from deploy.postgres import prepare_postgres
from deploy.supervisor import Supervisor

with DataFolder(Path(sys.argv[1])) as folder, Supervisor(folder) as supervisor:
    server = prepare_postgres(folder)
    supervisor.start(server.process)
    addresses = StackAddresses(database_url=server.url, broker_url="", broker_api_url=None, engine_url="")
    write_private(addresses_file(folder.path), addresses.to_json())
    print("up", flush=True)
    sys.stdin.read()
    addresses_file(folder.path).unlink()
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder whose stack is down, with one run in its database."""
    data_dir = tmp_path_factory.mktemp("stack")
    subprocess.run([sys.executable, "-c", MAKE_DATABASE, str(data_dir)], timeout=120, check=True)
    return data_dir


def command_line(*arguments: str, data_dir: Path) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", *arguments, "--data-dir", str(data_dir)]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}


def rollmill(*arguments: str, data_dir: Path) -> subprocess.CompletedProcess[str]:
    command = command_line(*arguments, data_dir=data_dir)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_sql_answers_in_a_pipe_with_tab_separated_values(data_dir: Path) -> None:
    done = rollmill("sql", "SELECT name, state FROM run", data_dir=data_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, "name\tstate\nold-run\tACTIVE\n", "")


def test_sql_may_not_write(data_dir: Path) -> None:
    done = rollmill("sql", "DELETE FROM run RETURNING id", data_dir=data_dir)
    assert done.returncode == 2
    assert done.stderr == "rollmill: the database refused: cannot execute DELETE in a read-only transaction\n"


def test_psql_takes_its_own_arguments_and_gives_its_exit_code(data_dir: Path) -> None:
    done = rollmill("psql", "-At", "-c", "SELECT name FROM run", data_dir=data_dir)
    assert (done.returncode, done.stdout) == (0, "old-run\n")
    assert rollmill("psql", "-c", "SELECT nonsense", data_dir=data_dir).returncode == 1


def test_sft_has_the_database_of_a_stack_that_is_down_and_the_trainers_options_and_exit_code(
    data_dir: Path, tmp_path: Path
) -> None:
    options = ("--model", str(TINY_MODELS / "tiny-calculator"), "--min-reward", "1", "--out", str(tmp_path / "new"))
    done = rollmill("sft", "--run", "old-run", *options, data_dir=data_dir)
    assert (done.returncode, done.stderr) == (
        2,
        "trainer sft: run old-run has no training episode with tokens and a reward of 1 or more: lower --min-reward, "
        "or take a run that was not pruned\n",
    )


def test_the_trainers_sft_without_a_named_database_says_which_command_finds_it(tmp_path: Path) -> None:
    options = ("--run", "old-run", "--model", str(TINY_MODELS / "tiny-calculator"), "--min-reward", "1")
    command = [sys.executable, "-m", "trainer", "sft", *options, "--out", str(tmp_path / "new")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "trainer sft: --run old-run: ROLLMILL_DATABASE_URL is not set: set it, or give the same options to "
        "`rollmill sft`, which takes the database in a data folder of `rollmill up`\n",
    )


def test_status_lists_the_runs(data_dir: Path) -> None:
    done = rollmill("status", data_dir=data_dir)
    assert " ".join(done.stdout.splitlines()[1].split()) == "old-run active - of 3 - - 0 of 0 0 0 -"


def test_report_is_of_the_newest_run_unless_one_is_named(data_dir: Path, tmp_path: Path) -> None:
    done = rollmill("report", "--json", str(tmp_path / "report.json"), data_dir=data_dir)
    assert "old-run is active" in done.stdout
    assert '"run": "old-run"' in (tmp_path / "report.json").read_text()
    unknown = rollmill("report", "nobody", data_dir=data_dir)
    assert unknown.stderr == "rollmill: no run nobody in the database; there are: old-run\n"


def test_who_needs_a_live_stack_hears_that_it_is_still_starting(data_dir: Path) -> None:
    """As those do who could start its database for themselves."""
    adding = ("engine", "add", "http://127.0.0.1:1", "--run", "old-run")
    down = f"rollmill: no stack runs on data folder {data_dir}: start one with `rollmill up`, "
    assert rollmill(*adding, data_dir=data_dir).stderr.startswith(down)
    starting = rf"rollmill: process {os.getpid()} \(.+\) holds data folder {data_dir} and has no stack up: .+\n"
    with DataFolder(data_dir):
        for command in (adding, ("engine", "list")):
            done = rollmill(*command, data_dir=data_dir)
            assert done.returncode == 2
            assert re.fullmatch(starting, done.stderr)


def test_who_comes_while_somebody_looks_at_a_stopped_stack_hears_who_that_is(data_dir: Path) -> None:
    """Its server ends with the one who looks, so nobody else can use it."""
    with subprocess.Popen(
        command_line("psql", data_dir=data_dir), env=environment(), stdin=PIPE, stdout=PIPE, text=True
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        print("\\echo open", file=shell.stdin, flush=True)
        assert shell.stdout.readline() == "open\n"
        holder = f"process {shell.pid} (cli.py psql --data-dir {data_dir})"
        start = rollmill("demo", data_dir=data_dir)
        assert (start.returncode, start.stderr) == (
            2,
            f"rollmill: data folder {data_dir} is in use by {holder}: wait until it has ended or stop it, "
            "or choose another folder with ROLLMILL_DATA_DIR\n",
        )
        question = rollmill("sql", "SELECT 1", data_dir=data_dir)
        assert (question.returncode, question.stderr) == (
            2,
            f"rollmill: {holder} holds data folder {data_dir} and has no stack up: "
            "try again when it is up or has ended\n",
        )
        shell.stdin.close()
        assert shell.wait(timeout=60) == 0
    assert rollmill("sql", "SELECT 1 AS one", data_dir=data_dir).stdout == "one\n1\n"


def test_a_stack_that_is_up_is_asked_itself(data_dir: Path) -> None:
    """Its holder has the lock, and its own server answers."""
    with subprocess.Popen(
        [sys.executable, "-c", BE_UP, str(data_dir)], env=environment(), stdin=PIPE, stdout=PIPE, text=True
    ) as stack:
        assert stack.stdin is not None
        assert stack.stdout is not None
        assert stack.stdout.readline() == "up\n"
        try:
            done = rollmill("sql", "SELECT name FROM run", data_dir=data_dir)
            assert (done.returncode, done.stdout, done.stderr) == (0, "name\nold-run\n", "")
        finally:
            stack.stdin.close()
        assert stack.wait(timeout=60) == 0


def test_nothing_is_left_running(data_dir: Path) -> None:
    assert rollmill("status", data_dir=data_dir).returncode == 0
    with DataFolder(data_dir):  # raises when somebody still holds it
        assert not (data_dir / "postgres" / "data" / "postmaster.pid").exists()
