"""Run in a sandbox, behind the text of `file_tools`: NUM_TRIES requests while a process turns their folder into a link.

Prints how many read the right file, were refused, and reached the other; and whether the other was changed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

NUM_TRIES = 10_000
HERE, EXCHANGE = -100, 2


def swap():
    """A folder and a link change their names, again and again: one or the other is always there."""
    Path("link").symlink_to("/tmp/outside")
    rename = ctypes.CDLL(None).renameat2
    while rename(HERE, b"folder", HERE, b"link", EXCHANGE) == 0:
        continue


def main(tools, open_beneath, open_step_by_step):
    """As many by either way to open."""
    outside = Path("/tmp/outside")
    for folder, text in ((Path("folder"), "inside"), (outside, "SECRET")):
        folder.mkdir()
        (folder / "file").write_text(text)
    swapping = os.fork()
    if swapping == 0:
        swap()
        os._exit(1)
    counts = {"inside": 0, "refused": 0, "SECRET": 0}
    for number in range(NUM_TRIES):
        globals()["open_beneath"] = open_step_by_step if number % 2 else open_beneath
        code, said = tools.answer({"tool": "view", "path": "folder/file", "first_line": None, "last_line": None})
        counts["refused" if code else said.split()[-1]] += 1
        if number % 10 == 0:
            tools.answer({"tool": "write", "path": "folder/file", "text": "inside"})
            tools.answer({"tool": "replace", "path": "folder/file", "old": "SECRET", "new": "CHANGED"})
            tools.answer({"tool": "write", "path": "folder/new/file", "text": "x"})
    os.kill(swapping, signal.SIGKILL)
    left = [path.name for path in outside.iterdir()]
    sys.stdout.write(f"{' '.join(map(str, counts.values()))} {(outside / 'file').read_text()} {left}")
