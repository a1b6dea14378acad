"""A state that is spread over the ranks, in one folder: each rank writes its own part, and reads what it needs of all.

The files are those of torch.distributed.checkpoint, which any number of ranks can read. checkpoint.py vouches for them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from common.errors import SetupError
from trainer.ranks import AgreedError, Ranks

INDEX_FILE = ".metadata"
"""Which part of which tensor lies where; written last, by the first rank."""
OWNER_FILE = "owner.json"


class ShardsFailed(AgreedError, SetupError):
    """A rank could not write or read its part, and all of them know."""


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A state in the files of several ranks, of which nobody need have the whole in memory."""

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    """What there is to read by name, on "meta"."""

    @classmethod
    def open(cls, folder: Path) -> Sharded:
        """All that is there. The folder's files must be known to be whole."""
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in found.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return cls(folder=folder, tensors=tensors)


def write_shards(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, owner: Mapping[str, str] | None, ranks: Ranks
) -> None:
    """Write this rank's part into an empty folder; all ranks call it.

    Raises ShardsFailed on all of them if one cannot.
    """
    _check_shared(folder, ranks)
    with _same_end(f"write its part of checkpoint {folder}", then="Make room or mend the folder; the step is replayed"):
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    if ranks.rank == 0 and owner is not None:
        (folder / OWNER_FILE).write_text(json.dumps(owner))


def read_shards(targets: Mapping[str, torch.Tensor], folder: Path, *, ranks: Ranks) -> None:
    """Fill these tensors, each whole or this rank's part of it; all ranks call it.

    Raises ShardsFailed on all of them if one cannot; the targets are then of no use.
    """
    _check_shared(folder, ranks)
    with _same_end(f"read its part of checkpoint {folder}", then="Mend the folder"), warnings.catch_warnings():
        # That there is one process is no news.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(targets), storage_reader=FileSystemReader(folder), no_dist=ranks.size == 1)


def _check_shared(folder: Path, ranks: Ranks) -> None:
    """A rank of another machine would make a folder of its own, and nobody would miss its part before a restart."""
    blind = [rank for rank, seen in enumerate(ranks.gather(folder.is_dir())) if not seen]
    if blind:
        raise ShardsFailed(
            f"ranks {blind} do not see folder {folder}: ROLLMILL_DATA_DIR must be a folder that all ranks share"
        )


@contextmanager
def _same_end(action: str, *, then: str) -> Iterator[None]:
    """What one rank's file system refuses is raised on all of them."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        # torch's own writer and reader have RuntimeError for the system's answers.
        if not isinstance(cause, OSError | RuntimeError):
            raise
        raise ShardsFailed(f"rank {rank} cannot {action}: {cause}. {then}") from error
