from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from common.errors import SetupError
from workers.open_files import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
raise_open_files(50)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
raise_open_files(300)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    raise_open_files(301)
except SetupError as error:
    print(str(error)[:60])
"""


def test_the_soft_limit_is_raised_as_far_as_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "(100, 300)",
        "(300, 300)",
        "301 open files are needed and the hard limit is 300: raise i",
    ]
