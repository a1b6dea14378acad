from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from deploy.folder import DataFolder


class WaitUntil(Protocol):
    def __call__(self, condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None: ...


@pytest.fixture
def wait_until() -> WaitUntil:
    def wait(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not so after {timeout_s} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    with DataFolder(tmp_path / "data") as folder:
        yield folder
