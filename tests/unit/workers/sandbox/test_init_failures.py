"""A node that cannot give what was asked for: INIT says so, as infrastructure, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_run_config
from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from common.settings import Settings, load_settings
from workers.sandbox import open_backend
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders
from workers.sandbox.protocol import SandboxSpec
from workers.sandbox.restricted import Restricted
from workers.sandbox.server_text import server_text


def test_a_full_disk_of_the_node(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", str(tmp_path)], check=True, timeout=60)
    try:
        backend = FolderBackend(SandboxFolders.below(tmp_path), Restricted())
        with pytest.raises(EpisodeError, match=r"No space left.*disk is full: free room.*ROLLMILL_DATA_DIR") as caught:
            backend.create("7-1", {"large.txt": "x" * (1 << 20)})
        assert caught.value.outcome is Outcome.SANDBOX_FAILED
        backend.destroy("7-1")
        backend.create("7-1", {"small.txt": "x"})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=60)


def test_an_unknown_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_SANDBOX", "jail")
    with pytest.raises(SetupError, match=r"ROLLMILL_SANDBOX='jail': .*'bubblewrap'"):
        load_settings()
    run = tmp_path / "run.toml"
    run.write_text('name = "a"\nmodel = "m"\n[sandbox]\nkind = "jail"\n')
    with pytest.raises(SetupError, match=r"sandbox.kind.*'bubblewrap'.*jail"):
        load_run_config(run)


def test_a_run_that_wants_bubblewrap_of_a_node_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(Settings(data_dir=tmp_path, sandbox="subprocess"))
    monkeypatch.setattr("workers.sandbox.bubblewrap.PATH", str(tmp_path))
    with pytest.raises(EpisodeError, match=r"bubblewrap is not installed on .*: see rollmill sandbox doctor") as caught:
        backend.choose(SandboxSpec(kind="bubblewrap"))
    assert caught.value.outcome is Outcome.SANDBOX_FAILED
    monkeypatch.undo()
    assert backend.choose(SandboxSpec(kind="bubblewrap")).kind == "bubblewrap"


def test_a_base_without_a_shell() -> None:
    program = "import sys\nserver = {'__name__': 'server'}\nexec(sys.argv[1], server)\nserver['SHELL'] = '/no/bash'\n"
    config = '{"limits": {}, "disks": [], "state_folder": "/none"}'
    source = server_text().decode()
    said = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(server['main'](['0', '1', sys.argv[2]]))", source, config],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert said.returncode == 1
    assert said.stderr == "there is no /no/bash, which runs the commands: add it to the image, or install it\n"
