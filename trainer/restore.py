"""Puts the state of the newest version into the policy at a start: its checkpoint, or the best there is without.

An older checkpoint alone is no substitute: the groups of the steps in between are marked as trained, and engines sample
from the newest version. Its published weights are the float32 numbers of its checkpoint, so only the optimizer's memory
is older then: no step is undone, no group lost or trained again.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common.db.versions import PolicyVersion
from common.errors import SetupError
from common.object_store import fetch
from common.weights import WeightsDamaged, is_url, verify
from trainer.checkpoint import CheckpointDamaged, CheckpointStore
from trainer.policy import Policy
from trainer.shards import Sharded

logger = logging.getLogger(__name__)


def restore(policy: Policy, checkpoints: CheckpointStore, newest: PolicyVersion) -> None:
    """Let `policy` be as it was when it made `newest`; with a damaged checkpoint, but for the optimizer's last steps.

    Raises SetupError that names the files: when the checkpoint is another model's, or when it is damaged and there is
    no older one, or no published weights. WeightsUnavailable when the weight store does not answer.
    """
    source, weights = checkpoints.path(newest.number), None
    try:
        state = checkpoints.load(newest.number)
    except CheckpointDamaged as damage:
        weights, state, older = _substitutes(policy, checkpoints, newest, damage)
        source = checkpoints.path(older)
        logger.error(
            "%s. Going on all the same run=%d version=%d: its weights are those published in %s, the optimizer's state "
            "is %d steps older, of checkpoint %s",
            damage,
            newest.run_id,
            newest.number,
            newest.location,
            newest.number - older,
            source,
        )
    try:
        policy.restore(state, weights=weights)
    except SetupError as error:
        raise SetupError(
            f"cannot go on from checkpoint {source}: {error}. Put the run's own folder back from a copy"
        ) from error


def _substitutes(
    policy: Policy, checkpoints: CheckpointStore, newest: PolicyVersion, damage: CheckpointDamaged
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | Sharded, int]:
    """The published weights, the newest whole checkpoint for its optimizer state, and that one's number."""
    for number in checkpoints.before(newest.number):
        try:
            older = checkpoints.load(number)
        except CheckpointDamaged as also:
            logger.warning("%s", also)
            continue
        try:
            with _folder_of(newest) as folder:
                weights = policy.published_state(folder)
        except WeightsDamaged as also:
            raise SetupError(
                f"cannot go on: {damage}; nor from version {newest.number} as it was published: {also}. "
                "Put one of the folders back from a copy, or start a new run under another name"
            ) from damage
        return weights, older, number
    raise SetupError(
        f"cannot go on: {damage}, and there is no older one to take the optimizer's state from. Put the folder back "
        "from a copy, or start a new run under another name; "
        f"the weights of version {newest.number} are published in {newest.location}"
    ) from damage


@contextmanager
def _folder_of(version: PolicyVersion) -> Iterator[Path]:
    """The files of a published version, each checked. Raises WeightsDamaged."""
    if not is_url(version.location):
        verify(version.path, version.manifest_sha256)
        yield version.path
        return
    with tempfile.TemporaryDirectory(prefix="rollmill-weights-") as folder:
        fetch(version.location, version.manifest_sha256, Path(folder))
        yield Path(folder)
