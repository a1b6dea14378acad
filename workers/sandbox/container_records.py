"""Which containers belong to a sandbox: noted before they are made, so that any process of the node can remove them.

And who watches over those whose note is lost: labels on the containers themselves, for `sweep`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree

from workers.sandbox.container_engine import Container, ContainerEngine
from workers.sandbox.owners import EXPIRY_GRACE_S, Identity
from workers.sandbox.protocol import DAY_S

DATA_DIR, HANDLE, WORKER, EXPIRES = (f"rollmill.{name}" for name in ("data-dir", "handle", "worker", "expires"))


@dataclass(frozen=True, kw_only=True)
class ContainerRecord:
    """The note of one container. Its file: `<handle>.<name>`."""

    file: Path
    url: str
    name: str

    @property
    def proxy_folder(self) -> Path:
        """Where the worker waits for a socket out of the container, while that starts."""
        return self.file.with_name(f".{self.file.name}.proxy")

    def write(self) -> None:
        """Whole or not at all."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self.file.with_name(f".{self.file.name}")
        fresh.write_text(json.dumps({"url": self.url, "name": self.name}))
        fresh.rename(self.file)

    def end(self, engine: ContainerEngine) -> None:
        """Remove the container, then the note. Raises EpisodeError, and the note stays."""
        engine.remove(self.name)
        rmtree(self.proxy_folder, ignore_errors=True)
        self.file.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class ContainerRecords:
    """All notes below one data folder."""

    root: Path

    def fresh(self, handle: str, url: str) -> ContainerRecord:
        """For a container that is about to be made."""
        name = f"rollmill-{handle}-{secrets.token_hex(4)}"
        return ContainerRecord(file=self.root / f"{handle}.{name}", url=url, name=name)

    def of(self, handle: str) -> list[ContainerRecord]:
        """Those of a sandbox."""
        found = []
        for file in self.root.glob(f"{handle}.*"):
            try:
                note = json.loads(file.read_text())
            except FileNotFoundError:
                continue
            found.append(ContainerRecord(file=file, url=str(note["url"]), name=str(note["name"])))
        return found

    def labels(self, handle: str, *, lifetime_s: float = DAY_S) -> dict[str, str]:
        """What a container says about itself to whoever finds it."""
        worker = Identity.of(os.getpid())
        assert worker is not None, "this process lives"
        return {
            DATA_DIR: str(self.root.parent),
            HANDLE: handle,
            WORKER: json.dumps(asdict(worker)),
            EXPIRES: str(int(time.time() + lifetime_s + EXPIRY_GRACE_S)),
        }

    def sweep(self, engine: ContainerEngine) -> int:
        """Remove containers of this data folder whose worker is dead, or whose time is up; how many.

        Raises EpisodeError.
        """
        lost = [found for found in engine.ours([f"{DATA_DIR}={self.root.parent}"]) if _is_lost(found)]
        for container in lost:
            engine.remove(container.id)
        return len(lost)


def _is_lost(container: Container) -> bool:
    if float(container.labels.get(EXPIRES, "0")) < time.time():
        return True
    worker = Identity(**json.loads(container.labels[WORKER]))
    # One in another process namespace, or on another machine, can't be looked at from here.
    return not worker.is_foreign and not worker.is_alive
