"""Adapters made whole in a data folder: one at a time, and nothing stays of a merge that was killed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.config import TINY_MODELS
from common.weights import WeightStore
from deploy.merged import merged_model
from tests.lora import make_adapted, publish_adapter

BASE = TINY_MODELS / "tiny-calculator"
WITHIN_S = 240.0


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return publish_adapter(WeightStore(tmp_path / "weights"), "run", 3, make_adapted(BASE, seed=1)).path


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """What a merge has written so far."""
    draft = tmp_path / "merged" / ".draft-x1"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(b"half")
    return draft


@contextmanager
def merging(root: Path) -> Iterator[None]:
    """As a process that merges holds the folder."""
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def test_the_draft_of_a_merge_that_was_killed_goes_with_the_next_one(adapter: Path, draft: Path) -> None:
    root = draft.parent
    made = merged_model(adapter, base=BASE, root=root)
    assert list(root.iterdir()) == [made]
    (root / ".draft-x2").mkdir()
    assert merged_model(adapter, base=BASE, root=root) == made
    assert list(root.iterdir()) == [made]


def test_the_draft_of_a_merge_that_goes_on_stays_and_is_waited_for(adapter: Path, draft: Path) -> None:
    made: list[Path] = []
    waiting = threading.Thread(target=lambda: made.append(merged_model(adapter, base=BASE, root=draft.parent)))
    with merging(draft.parent):
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive()
        assert (draft / "model.safetensors").exists()
        assert made == []
    waiting.join(WITHIN_S)
    assert list(draft.parent.iterdir()) == made
