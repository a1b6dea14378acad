"""What comes out of an agent's sandbox, and what an honest agent gets for it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.unit.workers.sandbox.conftest import WALLED
from tests.unit.workers.sandbox.evaluation import Evaluation
from tests.unit.workers.sandbox.test_evaluator_cheats import CALLS, HONEST, IN_PROCESS, WRONG
from workers.evaluator.submission import FileRules
from workers.evaluator.suite import Call, Fault, InProcess, Program
from workers.run_loop import RunLoop
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.inside.calls import Collection
from workers.stage_threads import StageThreads, StageTimeout

pytestmark = pytest.mark.robustness

PROGRAM = Program(name="program", argv=("python3", "-I", "solution.py"), input="40 2\n", expected="42")
READS = HONEST + "if __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"

MAKE_ODD_FILES = r"""
ln -s /etc/shadow solution.py; ln -s /usr/lib/python3 linked; mkfifo fifo.py
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket.py")'
echo x > one; ln one two.py; python3 -c 'open("huge.py", "w").truncate(50 << 20)'
echo hidden > closed.py; chmod 000 closed.py
printf x > $'new\nline.py'; printf x > $'\xff.py'; printf x > 'back\slash.py'; printf x > $'right\u202eto left.py'
mkdir -p git/.git/hooks pkg; echo x > git/.git/hooks/evil.py; echo x > pkg/pyproject.toml; echo x > pkg/conftest.py
for n in $(seq 30); do mkdir deep; cd deep; done; echo x > deep.py; cd /workspace
echo good > pkg/good.py; echo unwanted > pkg/notes.txt
"""


@pytest.fixture
def evaluation(bubblewrap: FolderBackend, judging_loop: RunLoop) -> Evaluation:
    """With bubblewrap."""
    return Evaluation(backend=bubblewrap, loop=judging_loop)


@pytest.mark.parametrize("kind", WALLED)
async def test_an_honest_agent_passes(kind: str, request: pytest.FixtureRequest, judging_loop: RunLoop) -> None:
    evaluation = Evaluation(backend=request.getfixturevalue(kind), loop=judging_loop)
    submission = await evaluation.handed_in(files={"solution.py": READS})
    report = await evaluation.report(submission, (*CALLS, IN_PROCESS, PROGRAM))
    assert [(result.name, result.fault) for result in report.results] == [
        (name, None) for name in ("call 1", "call 40", "test_small", "test_large", "program")
    ]
    assert (report.tampered, report.num_passed, report.fraction_passed) == (False, 5, 1.0)
    assert report.parts == {"tests": 5.0, "tests_passed": 5.0}


async def test_without_walls_an_honest_agent_passes_too(limited: FolderBackend, judging_loop: RunLoop) -> None:
    evaluation = Evaluation(backend=limited, loop=judging_loop)
    submission = await evaluation.handed_in(files={"solution.py": HONEST})
    report = await evaluation.report(submission, (*CALLS, IN_PROCESS))
    assert (report.tampered, report.fraction_passed) == (False, 1.0), report


async def test_half_of_it_right(evaluation: Evaluation) -> None:
    submission = await evaluation.handed_in(files={"solution.py": "def add(a, b):\n    return 3\n"})
    report = await evaluation.report(submission, (*CALLS, IN_PROCESS))
    assert [result.fault for result in report.results] == [None, Fault.WRONG, None, Fault.ERROR]
    assert report.parts == {"tests": 4.0, "tests_error": 1.0, "tests_passed": 2.0, "tests_wrong": 1.0}


@pytest.mark.parametrize("kind", WALLED)
async def test_only_plain_files_come_out(kind: str, request: pytest.FixtureRequest, judging_loop: RunLoop) -> None:
    evaluation = Evaluation(backend=request.getfixturevalue(kind), loop=judging_loop)
    rules = FileRules(wanted=("**/*.py", "**/*.toml"), file_bytes=1000, total_bytes=5000, num_files=20)
    submission = await evaluation.handed_in(MAKE_ODD_FILES, rules=rules)
    assert submission.files == {"pkg/good.py": b"good\n"}
    assert submission.left_out == {
        "link": 1,
        "special": 2,
        "hard_link": 1,
        "too_large": 1,
        "unreadable": 1,
        "name": 4,
        "refused": 3,
        "too_deep": 1,
    }


async def test_what_is_beyond_the_limits_stays(evaluation: Evaluation) -> None:
    rules = FileRules(wanted=("*.py",), file_bytes=1000, total_bytes=2500, num_files=3)
    submission = await evaluation.handed_in(
        "for n in $(seq 1 3); do head -c 1000 /dev/zero > big$n.py; done; for n in 1 2 3; do : > small$n.py; done",
        rules=rules,
    )
    assert (sorted(submission.files), submission.left_out) == (
        ["big1.py", "big2.py", "small1.py"],
        {"too_large": 1, "too_many": 2},
    )


async def test_long_names_stay_and_cost_nothing(evaluation: Evaluation) -> None:
    """Each of 20 folders would lead to names of 3,000 characters, at which patterns are slow."""
    script = """
import os
for top in range(20):
    path = "/".join([f"d{top}"] + ["x" * 200] * 14)
    os.makedirs(path)
    os.chdir(path)
    open("y" * 200 + ".py", "w").close()
    os.chdir("/workspace")
os.makedirs("/".join(["x" * 190] * 5))
os.chdir("/".join(["x" * 190] * 5))
open("y" * 60 + ".py", "w").close()
open("z.py", "w").close()
"""
    submission = await evaluation.handed_in(f"/usr/bin/python3 - <<'END'{script}END")
    assert ([len(name) for name in submission.files], submission.left_out) == ([959], {"too_deep": 20, "name": 1})


def test_what_takes_too_long_to_find_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one.py", "two.py"):
        Path(name).touch()
    rules = {"wanted": ".*", "refused": "(?!)", "file_bytes": 10, "total_bytes": 10, "num_files": 9}
    late, early = Collection(rules), Collection(rules)
    late.search(time.monotonic() - 1)
    early.search(time.monotonic() + 60)
    assert (late.num_files, late.left_out) == (0, {"time": 1})
    assert (early.num_files, early.left_out) == (2, {})


async def test_a_background_process_changes_nothing_after_the_last_command(evaluation: Evaluation) -> None:
    later = '(setsid bash -c \'trap "" TERM HUP; while :; do echo "later = 1" > solution.py; sleep 0.01; done\' &)'
    submission = await evaluation.handed_in(f"{later}; sleep 0.2; echo last")
    report = await evaluation.report(submission, CALLS)
    # Either it was there when the last command ended, or a half of it; EVAL sees just that.
    assert submission.files["solution.py"] in (b"later = 1\n", b"")
    assert {result.fault for result in report.results} == {Fault.ERROR}


async def test_nothing_of_an_evaluation_stays(evaluation: Evaluation, folders: SandboxFolders) -> None:
    submission = await evaluation.handed_in(files={"solution.py": WRONG})
    await evaluation.report(submission, CALLS)
    assert [path.name for path in folders.root.iterdir()] == ["7-1"]
    assert list(folders.owners.root.iterdir()) == []


async def test_wrong_tests_are_the_handlers_error(evaluation: Evaluation) -> None:
    submission = await evaluation.handed_in(files={"solution.py": HONEST})
    with pytest.raises(ValueError, match="two tests have the same name"):
        await evaluation.report(submission, (CALLS[0], CALLS[0]))
    long = Call(name="long", module="solution", function="add", arguments=("x" * 70_000, 1), expected=1)
    with pytest.raises(ValueError, match="test long: more than 60000 bytes"):
        await evaluation.report(submission, (long,))
    with pytest.raises(ValueError, match="there are no tests"):
        await evaluation.report(submission, ())
    for names in (("a", "a/b"), ("a/b/c", "a")):
        with pytest.raises(ValueError, match="the first can't be a folder too"):
            await evaluation.report(submission, CALLS, files=dict.fromkeys(names, ""))
    for program in ("pyhton3", "/usr/bin/pyhton3"):
        typo = Program(name="typo", argv=(program, "solution.py"), expected="")
        with pytest.raises(ValueError, match=f"the sandbox has no program '{program}'"):
            await evaluation.report(submission, (typo,))


async def test_a_program_that_the_agent_was_to_write_is_its_own_fault(evaluation: Evaluation) -> None:
    submission = await evaluation.handed_in(files={"solution.py": HONEST})
    report = await evaluation.report(submission, (Program(name="own", argv=("./run",), expected=""),))
    assert [result.fault for result in report.results] == [Fault.ERROR]


async def test_agents_steer_no_program_by_files_of_its_home(evaluation: Evaluation) -> None:
    rules = FileRules(wanted=("**",), refused=())
    files = {".gitconfig": "[user]\nname = agent\n", ".bash_profile": "echo agent\n"}
    submission = await evaluation.handed_in(files=files, rules=rules)
    assert set(submission.files) == set(files)
    command = 'ls -A "$HOME"; touch "$HOME/x"; echo done'
    shell = Program(name="shell", argv=("bash", "-lc", command), expected="done\n")
    again = Program(name="again", argv=("bash", "-lc", command), expected="done\n")
    report = await evaluation.report(submission, (shell, again))
    assert report.fraction_passed == 1.0, report


async def test_the_tests_own_files_win(evaluation: Evaluation) -> None:
    liar = "def known(): return 'liar'\n"
    # What the agent has there takes no place of theirs, not even from another folder.
    moves = "import os\nos.makedirs('/tmp/x', exist_ok=True)\nos.chdir('/tmp/x')\n" + HONEST
    agents = {"solution.py": moves, "helper/__init__.py": liar, "data.py": liar}
    submission = await evaluation.handed_in(files=agents)
    source = """
import solution
from helper import known
from data import known as also_known
def test_whose(): assert (known(), also_known()) == ("tests", "tests")
def canary(): assert known() == "liar"
"""
    own = {"helper.py": "def known(): return 'tests'\n", "data.py": "def known(): return 'tests'\n"}
    test = InProcess(source=source, functions=("test_whose",), canary="canary")
    report = await evaluation.report(submission, (test,), files=own)
    assert (report.num_passed, report.tampered) == (1, False), report


async def test_an_eval_that_is_told_to_stop_ends_its_sandbox(evaluation: Evaluation, folders: SandboxFolders) -> None:
    submission = await evaluation.handed_in(files={"solution.py": "import time\ntime.sleep(600)\n"})
    judge = evaluation.judge(submission)
    work = StageThreads("eval").submit(lambda: judge.run(CALLS, timeout_s=500))
    async with asyncio.timeout(60):
        while not folders.owners.of(judge.handle):  # noqa: ASYNC110 - another thread is the event
            await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(StageTimeout):
        await asyncio.to_thread(work.result, 60)
    assert list(folders.owners.root.iterdir()) == []
    assert [path.name for path in folders.root.iterdir()] == ["7-1"]


def test_what_killed_evaluations_left_is_found_after_a_day(folders: SandboxFolders) -> None:
    for handle in ("7-1", "7-1-eval", "8-1-eval"):
        folders.create(handle, {})
    for handle in ("7-1", "8-1-eval"):
        os.utime(folders.path(handle), (0, 0))
    assert folders.forgotten_evaluations() == ["8-1-eval"]
