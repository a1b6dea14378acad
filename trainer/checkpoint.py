"""The trainer's own state after each version: float32 weights and optimizer state, to go on from after a stop.

`checkpoints/<run>/000007` is the state that made version 7: a safetensors file, or those of several ranks (shards.py).
Seeds and learning rates follow from the version number, and the feeder's place in the task set is in the database, so
there is nothing else to keep. restore.py reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.errors import SetupError
from common.weights import MANIFEST, WeightsDamaged, WeightStore, verify
from trainer.shards import INDEX_FILE, OWNER_FILE, Sharded

STATE_FILE = "state.safetensors"


class CheckpointDamaged(SetupError):
    """A checkpoint is missing, or is not what its manifest says. The message names the file."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose checkpoints they are: a run of another database may have the same name. Written into each of them."""

    run: str
    """The run's name."""
    made_at: str
    """When the run was made, in ISO 8601 with microseconds; goes with the run into a copy of its database."""
    database: str
    """Its address without password, for people."""


class CheckpointStore:
    """Checkpoints of one run, each a folder that is there whole or not at all."""

    def __init__(self, root: Path, run: str, *, owner: Owner | None = None) -> None:
        """`owner` None = nothing is written of it, and nobody's checkpoints are refused."""
        self._store = WeightStore(root)
        self._run = run
        self._owner = owner

    def path(self, version: int) -> Path:
        """The folder of the state that made `version`."""
        return self._store.path(self._run, version)

    def save(self, version: int, write: Callable[[Path, Mapping[str, str] | None], None]) -> Path:
        """Let `write` fill an empty folder with the state that made `version`, and its owner; returns the folder."""
        owner = None if self._owner is None else asdict(self._owner)
        return self._store.publish(self._run, version, lambda draft: write(draft, owner)).path

    def check_owner(self) -> None:
        """Raise SetupError for checkpoints of a run that has only the name in common: they would be overwritten.

        Those that say nothing of their owner pass, as do damaged ones, which are for `load` to judge.
        """
        if self._owner is None:
            return
        owners = {path: _owner_in(path) for path in map(self.path, self._store.numbers(self._run))}
        made_at = self._owner.made_at
        foreign = [path for path, owner in owners.items() if owner.get("made_at", made_at) != made_at]
        if foreign:
            theirs = owners[foreign[0]]
            raise SetupError(
                f"{foreign[0]} is of {_named(theirs.get('run'))} of database {theirs.get('database')}, made "
                f"{theirs['made_at']}, and this is run {self._run} of database {self._owner.database}, made {made_at}: "
                "take another name or ROLLMILL_DATA_DIR, or delete "
                f"{' and '.join(map(str, foreign))} if nobody goes on with that run"
            )

    def load(self, version: int) -> dict[str, torch.Tensor] | Sharded:
        """The state that made `version`, read only if every byte is as it was written. Raises CheckpointDamaged.

        What several ranks wrote is not in memory yet.
        """
        folder = self.path(version)
        try:
            # The manifest vouches for the files. It needs no voucher: a damaged manifest does not match them.
            verify(folder, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())
            return Sharded.open(folder) if (folder / INDEX_FILE).exists() else load_file(folder / STATE_FILE)
        except (OSError, WeightsDamaged) as error:
            raise CheckpointDamaged(f"checkpoint {folder}: {error}") from error

    def before(self, version: int) -> list[int]:
        """Numbers of the older ones that are there, the newest first."""
        return [number for number in reversed(self._store.numbers(self._run)) if number < version]

    def prune(self, newest: int, *, num_kept: int) -> None:
        """Delete those older than the newest `num_kept`. `newest` must be marked done: until then it may be lost."""
        self._store.prune(self._run, keep_from=newest - num_kept + 1)

    def sweep(self) -> None:
        """Delete what a trainer left half written when it was killed."""
        self._store.sweep(self._run)


def write_whole(tensors: Mapping[str, torch.Tensor], folder: Path, owner: Mapping[str, str] | None) -> None:
    """Write the state of a trainer that is one process, as one file."""
    state = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(state, folder / STATE_FILE, metadata=None if owner is None else dict(owner))


def _named(run: str | None) -> str:
    """A run by the name that its checkpoint gives; those of before gave none."""
    return "a run" if run is None else f"run {run}"


def _owner_in(folder: Path) -> Mapping[str, str]:
    """What a checkpoint says of its owner; nothing where it cannot be read."""
    try:
        if (folder / OWNER_FILE).exists():
            owner: dict[str, str] = json.loads((folder / OWNER_FILE).read_bytes())
            return owner
        with safe_open(folder / STATE_FILE, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, ValueError, SafetensorError):
        return {}
