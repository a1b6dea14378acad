"""What the filter of system calls leaves to programs, and its rows that no container engine knows by name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest

from tests.unit.workers.sandbox.test_attacks import CALL, call_number
from workers.sandbox import seccomp
from workers.sandbox.backend import FolderBackend
from workers.sandbox.protocol import SandboxSession
from workers.sandbox.seccomp_profile import profile

OWN_SCHEDULING = """
nice -n 3 nice; taskset 1 echo cpu; ionice -c 3 echo disk; chrt --batch 0 echo batch
/usr/bin/python3 - <<'END'
import os, resource
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setparam(0, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, 0, 19)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("python", os.nice(0))
END
cat /proc/sys/kernel/ostype
"""


@pytest.fixture
async def session(bubblewrap: FolderBackend) -> AsyncIterator[SandboxSession]:
    """A sandbox of bubblewrap's."""
    await asyncio.to_thread(bubblewrap.create, "7-1", {})
    opened = bubblewrap.attach("7-1")
    yield opened
    await opened.close()


async def test_programs_may_choose_their_own_scheduling(session: SandboxSession) -> None:
    result = await session.exec(OWN_SCHEDULING, timeout_s=60)
    assert (result.output, result.exit_code) == ("8\ncpu\ndisk\nbatch\npython 19\nLinux\n", 0)


async def test_a_mount_by_the_newest_call_is_refused(session: SandboxSession) -> None:
    """Told by its number: the engines' library does not know the name everywhere, and then leaves it out."""
    result = await session.exec(CALL % f"{call_number('open_tree_attr')}, -100, b'/', 0, 0, 0", timeout_s=60)
    assert result.output == "stopped Operation not permitted\n"


@pytest.mark.skipif(os.uname().machine not in seccomp.ARCHITECTURES, reason="no table for this machine")
def test_engines_are_told_the_same_rules_for_other_processes() -> None:
    rules = json.loads(profile(has_ip=False))["syscalls"]
    told: dict[str, dict[int, int]] = {name: {} for name in seccomp.ITSELF}
    for rule in rules:
        if rule["names"][0] in told:
            (argument,) = rule["args"]
            assert (argument["op"], rule["errnoRet"]) == ("SCMP_CMP_NE", 1)
            told[rule["names"][0]][argument["index"]] = argument["value"]
    assert told == {name: own for name, (_, own) in seccomp.ITSELF.items()}
