"""Where a trainer goes on when the newest checkpoint is damaged: the newest weights, an older optimizer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common.db.versions import PolicyVersion
from common.errors import SetupError
from common.object_store import ObjectStore
from common.weights import Published, VersionStore, WeightStore
from tests.unit.trainer.conftest import MakePolicy, MakeSample
from trainer.checkpoint import STATE_FILE, CheckpointStore
from trainer.lora import adapter_writer
from trainer.policy import Policy
from trainer.publish import version_writer
from trainer.restore import restore

ADVANTAGES = {1: 1.0, 2: -1.0}
State = dict[str, torch.Tensor]


def part(state: State, kind: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(kind)}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def published(policy: Policy, store: VersionStore, start: Path) -> PolicyVersion:
    adapted = policy.train.lora_rank is not None
    write = adapter_writer(policy.model) if adapted else version_writer(policy.model, start=start)
    found: Published = store.publish("run", 3, write)
    return PolicyVersion(
        run_id=1,
        run="run",
        number=3,
        location=found.location,
        manifest_sha256=found.manifest_sha256,
        in_flight="keep",
        adapters_kept=1 if adapted else None,
        model=start,
        max_row_tokens=None,
    )


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("store", ["folder", "objects"])
def test_weights_are_the_published_ones_and_moments_those_of_the_newest_whole_checkpoint(
    make_policy: MakePolicy,
    make_random_sample: MakeSample,
    start_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lora_rank: int | None,
    store: str,
) -> None:
    group = [make_random_sample(number, policy=make_policy()) for number in ADVANTAGES]
    policy, checkpoints, states = make_policy(lora_rank=lora_rank), CheckpointStore(tmp_path, "run"), {}
    for version in range(3):
        policy.train_step(group, ADVANTAGES, version=version)
        states[version + 1] = {name: tensor.clone() for name, tensor in policy.state().items()}
        checkpoints.save(version + 1, policy.write_state)
    where = WeightStore(tmp_path / "weights") if store == "folder" else ObjectStore(f"file://{tmp_path}/objects")
    newest = published(policy, where, start_folder)
    whole, short = make_policy(lora_rank=lora_rank), make_policy(lora_rank=lora_rank)

    restore(whole, checkpoints, newest)
    assert equal(whole.state(), states[3])
    assert caplog.records == []

    for damaged in (2, 3):
        (checkpoints.path(damaged) / STATE_FILE).write_bytes(b"")
    restore(short, checkpoints, newest)
    assert equal(part(short.state(), "model."), part(states[3], "model."))
    assert equal(part(short.state(), "optimizer."), part(states[1], "optimizer."))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert f"{checkpoints.path(3)}: " in caplog.messages[1]
    assert "the optimizer's state is 2 steps older" in caplog.messages[1]


def test_without_any_whole_checkpoint_it_is_refused(make_policy: MakePolicy, start_folder: Path, tmp_path: Path):
    policy = make_policy()
    newest = published(policy, WeightStore(tmp_path / "weights"), start_folder)
    with pytest.raises(SetupError, match=f"{tmp_path}/run/000003: .* no older one .* published in {newest.location}"):
        restore(policy, CheckpointStore(tmp_path, "run"), newest)
