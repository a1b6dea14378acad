#!/usr/bin/python3
"""Plays `apptainer exec`: notes its command line, refuses options that Apptainer does not have, and runs the program
within bubblewrap's walls, which stand as those options say. An image is a folder; `python3` in it says there is one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

FLAGS = {"--userns", "--containall", "--no-init", "--no-home", "--cleanenv", "--no-eval", "--no-privs", "--net"}
WITH_VALUE = {"--no-mount", "--network", "--hostname", "--scratch", "--memory", "--pids-limit", "--cpus", "--bind"}


def fail(text: str) -> None:
    """As Apptainer does."""
    sys.stderr.write(f"FATAL:   {text}\n")
    sys.exit(255)


def main(words: list[str]) -> None:
    """Becomes bubblewrap."""
    with Path(__file__).with_name("calls.jsonl").open("a") as calls:
        calls.write(json.dumps({"argv": words, "environment": sorted(os.environ)}) + "\n")
    if words[:2] != ["--quiet", "exec"]:
        fail(f"unknown command {words[:2]}")
    words = words[2:]
    options: dict[str, str] = {}
    while words[0].startswith("-"):
        name = words.pop(0)
        if name not in FLAGS | WITH_VALUE:
            fail(f"unknown flag: {name}")
        options[name] = words.pop(0) if name in WITH_VALUE else ""
    image = Path(words.pop(0))
    if not image.exists():
        fail(f"could not open image {image}: no such file or directory")
    if not (image / words[0]).exists():
        fail(f'"{words[0]}": executable file not found in $PATH')
    walls = ["bwrap", "--unshare-user", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"]
    walls += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        walls += ["--symlink", f"usr{name}", name] if Path(name).is_symlink() else ["--ro-bind-try", name, name]
    walls += ["--proc", "/proc", "--dev", "/dev", "--size", str(64 << 20), "--tmpfs", options["--scratch"]]
    walls += ["--size", str(64 << 20), "--tmpfs", "/tmp"]
    walls += ["--unshare-pid"] if "--containall" in options else []
    walls += ["--as-pid-1"] if "--no-init" in options and "--unshare-pid" in walls else []
    walls += ["--unshare-net"] if options.get("--network") == "none" and "--net" in options else []
    environment = {"PATH": "/usr/bin:/bin", "APPTAINER_CONTAINER": str(image)}
    os.execvpe("bwrap", [*walls, "--", *words], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
