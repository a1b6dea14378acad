"""Makes a whole model of a version that is a LoRA adapter, so that an engine can be started with it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import SetupError
from common.model_folder import adapter_base, is_adapter
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS

TIMEOUT_S = 3600.0
"""A large model's start weights may come over a network."""


def merged_model(adapter: Path, *, base: Path, root: Path) -> Path:
    """Folder below `root` of the start weights `base` with the adapter in them; made unless it is there.

    Waits for: another merge below `root`, whose own time is limited. What a killed one has left there goes. Raises
    SetupError where the adapter was trained over another model, or fits this one not.
    """
    adapter, base = adapter.absolute(), base.absolute()
    named = adapter_base(adapter)
    if named is not None and named.is_dir() and not (base.exists() and named.samefile(base)):
        raise SetupError(
            f"adapter {adapter} was trained over {named}, and the run's model is {base}: name its own run file"
        )
    if is_adapter(base):
        raise SetupError(
            f"adapter {adapter} needs the run's start weights under it, and model = {base} is an adapter too"
        )
    out = root / _identity(adapter, base)
    with _alone(root) as lock:
        # Alone, so that every draft is one of a process that was killed.
        for draft in root.glob(".draft-*"):
            shutil.rmtree(draft)
        if not out.exists():
            _merge(adapter, base=base, out=out, lock=lock)
    return out


@contextmanager
def _alone(root: Path) -> Iterator[int]:
    """Hold the folder's lock, which the kernel takes when the last process that has its descriptor is gone."""
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def _identity(adapter: Path, base: Path) -> str:
    """The same for the same files: a command that is given again finds the folder that its run was opened with."""
    content = hashlib.sha256(str(base).encode())
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        try:
            content.update((adapter / name).read_bytes())
        except OSError as error:
            raise SetupError(f"adapter {adapter} cannot be read: {name}: {error.strerror}") from None
    return content.hexdigest()[:16]


def _merge(adapter: Path, *, base: Path, out: Path, lock: int) -> None:
    """The process that merges has the lock too: where ours is killed, it goes on."""
    command = (sys.executable, "-m", "trainer", "merge")
    arguments = ("--model", str(base), "--adapter", str(adapter), "--out", str(out))
    try:
        done = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            pass_fds=(lock,),
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"adapter {adapter} is not merged into {base} after {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SetupError((said[-1] if said else f"exit code {done.returncode}").removeprefix("trainer: "))
