"""The trainer's own state after each version: float32 weights and optimizer state, to go on from after a stop.

`checkpoints/<run>/000007` is the state that made version 7. Seeds and learning rates follow from the version number,
so there is nothing else to keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.errors import SetupError
from common.weights import MANIFEST, WeightsDamaged, WeightStore, verify

STATE_FILE = "state.safetensors"
NUM_KEPT = 2


class CheckpointStore:
    """Checkpoints of one run, each a folder that is there whole or not at all. The newest two are kept."""

    def __init__(self, root: Path, run: str) -> None:
        self._store = WeightStore(root)
        self._run = run

    def save(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write the state that made `version`, then delete older ones; returns its folder."""
        state = {name: tensor.contiguous() for name, tensor in tensors.items()}
        saved = self._store.publish(self._run, version, lambda draft: save_file(state, draft / STATE_FILE))
        self._store.prune(self._run, keep_from=version - NUM_KEPT + 1)
        return saved.path

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """The state that made `version`.

        Raises SetupError when it is missing or damaged. An older one is no substitute: the groups of the steps in
        between are marked as trained and would be lost.
        """
        folder = self._store.path(self._run, version)
        try:
            # The manifest vouches for the files. It needs no voucher: a damaged manifest does not match them.
            verify(folder, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest())
            return load_file(folder / STATE_FILE)
        except (OSError, WeightsDamaged) as error:
            raise SetupError(
                f"cannot go on from checkpoint {folder}: {error}. "
                "Put the folder back from a copy, or start a new run under another name"
            ) from error
