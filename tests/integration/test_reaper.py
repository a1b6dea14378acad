"""A reaper's round does all that it can, whatever cannot be done."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from common.db import sandboxes
from common.db.episodes import Wakeup
from common.episode import Stage
from common.errors import EpisodeError
from common.outcomes import Outcome
from common.settings import Settings
from tests.integration.world import World
from workers.reaper import Reaper
from workers.sandbox.protocol import OPEN, SandboxSession, SandboxSpec


class StubbornBackend:
    """Keeps one sandbox, whatever it is told."""

    def __init__(self, kept: str) -> None:
        self._kept = kept
        self.removed: list[str] = []

    def handle(self, episode_id: int, attempt: int) -> str:
        return f"{episode_id}-{attempt}"

    def choose(self, spec: SandboxSpec) -> SandboxSpec:
        raise NotImplementedError

    def create(self, handle: str, files: Mapping[str, str], spec: SandboxSpec = OPEN) -> None:
        raise NotImplementedError

    def attach(self, handle: str, spec: SandboxSpec = OPEN) -> SandboxSession:
        raise NotImplementedError

    def sweep(self) -> None:
        """Nothing is orphaned."""

    def destroy(self, handle: str) -> None:
        if handle == self._kept:
            raise EpisodeError(Outcome.SANDBOX_FAILED, f"cannot remove sandbox {handle}")
        self.removed.append(handle)


@pytest.fixture
def handles(world: World) -> list[str]:
    """Sandboxes of two episodes that are final."""
    found = []
    for wakeup in world.feed():
        handle = f"{wakeup.episode_id}-1"
        claim = world.must_claim(wakeup)
        with world.database.begin() as conn:
            sandboxes.record(conn, claim, backend="stubborn", node=socket.gethostname(), handle=handle)
            conn.execute(
                text("UPDATE episode SET state = 'CANCELLED', claim_token = NULL WHERE id = :id"),
                {"id": wakeup.episode_id},
            )
        found.append(handle)
    return found


def test_a_sandbox_that_cannot_be_removed_keeps_nothing_else_waiting(
    world: World, handles: list[str], tmp_path: Path
) -> None:
    backend = StubbornBackend(handles[0])
    sent: list[Wakeup] = []
    reaper = Reaper(world.database, Settings(data_dir=tmp_path), backend, sent.extend)

    reaper.round()
    (other, _) = world.feed()
    world.must_claim(other, lease_s=-1)
    reaper.round()

    assert backend.removed == [handles[1]]
    assert Wakeup(stage=Stage.INIT, episode_id=other.episode_id, attempt=2) in sent
    with world.database.begin() as conn:
        left = sandboxes.orphans(conn, node=socket.gethostname())
    assert [orphan.handle for orphan in left] == [handles[0]]


def test_a_broker_that_starts_empty_gets_each_waiting_episode_once(world: World, tmp_path: Path) -> None:
    waiting = [wakeup for _ in range(3) for wakeup in world.feed()]
    sent: list[Wakeup] = []
    Reaper(world.database, Settings(data_dir=tmp_path), StubbornBackend(""), sent.extend).resend_all()
    assert sorted(sent, key=lambda wakeup: wakeup.episode_id) == waiting


def test_an_episode_that_fails_again_is_announced_when_its_wait_is_over(world: World, tmp_path: Path) -> None:
    sent: list[Wakeup] = []
    settings = Settings(data_dir=tmp_path, retry_backoff_s=60)
    reaper = Reaper(world.database, settings, StubbornBackend(""), sent.extend)
    (wakeup, _) = world.feed()
    for attempt in (1, 2):
        world.must_claim(replace(wakeup, attempt=attempt), lease_s=-1)
        reaper.round()
    reaper.round()
    assert sent == [replace(wakeup, attempt=2)]
    with world.database.begin() as conn:
        conn.execute(text("UPDATE episode SET not_before = now() WHERE not_before IS NOT NULL"))
    reaper.round()
    assert sent[1:] == [replace(wakeup, attempt=3)]
