"""Only the very processes of a record are ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import EpisodeError
from workers.sandbox.owners import Identity, Owned, Owners


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "60"])
    yield started
    started.kill()
    started.wait(10)


@pytest.fixture
def owners(tmp_path: Path) -> Owners:
    return Owners(root=tmp_path / "owners")


def owned_by_us(process: subprocess.Popen[bytes]) -> Owned:
    worker, outer = Identity.of(os.getpid()), Identity.of(process.pid)
    assert worker is not None
    assert outer is not None
    return Owned(worker=worker, outer=outer, inner=None)


def test_a_recorded_process_is_ended_and_forgotten(owners: Owners, process: subprocess.Popen[bytes]) -> None:
    owners.record("7-1", owned_by_us(process))
    owners.end("17-1")
    assert process.poll() is None
    owners.end("7-1")
    assert process.wait(10) < 0
    assert owners.of("7-1") == {}
    owners.end("7-1")


def test_a_number_that_another_process_has_by_now_is_left_alone(
    owners: Owners, process: subprocess.Popen[bytes]
) -> None:
    owned = owned_by_us(process)
    owners.record("7-1", replace(owned, outer=replace(owned.outer, started=owned.outer.started - 1)))
    owners.end("7-1")
    assert process.poll() is None
    assert owners.of("7-1") == {}


def test_a_process_of_another_namespace_is_gone_when_its_worker_is(
    owners: Owners, process: subprocess.Popen[bytes]
) -> None:
    owned = owned_by_us(process)
    boot_id = owned.outer.boot.split()[0]
    record = owners.record("7-1", replace(owned, outer=replace(owned.outer, boot=f"{boot_id} pid:[1]")))
    with pytest.raises(EpisodeError, match="another process namespace"):
        owners.end("7-1")
    os.close(record._lock_fd)
    owners.end("7-1")
    assert process.poll() is None
    assert owners.of("7-1") == {}


def test_a_zombie_has_ended(process: subprocess.Popen[bytes]) -> None:
    owned = owned_by_us(process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Identity.of(process.pid) is None
    assert owned.end()
