"""Checkpoints are whole or not there, and a damaged one is never read."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from common.errors import SetupError
from trainer.checkpoint import STATE_FILE, CheckpointDamaged, CheckpointStore, Owner, write_whole

STATE = {"model.a": torch.tensor([1.5, -2.0]), "optimizer.step.a": torch.tensor(3.0)}
SAVE = partial(write_whole, STATE)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, "first")


def whole_state(store: CheckpointStore, version: int) -> dict[str, torch.Tensor]:
    loaded = store.load(version)
    assert isinstance(loaded, dict)
    return loaded


def test_state_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    store.save(7, SAVE)
    loaded = whole_state(store, 7)
    assert loaded.keys() == STATE.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in STATE.items())


def test_saving_deletes_nothing_and_pruning_all_but_the_newest(store: CheckpointStore) -> None:
    folders = [store.save(version, SAVE) for version in (1, 2, 3, 4)]
    assert store.before(4) == [3, 2, 1]
    store.prune(3, num_kept=2)
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    store.prune(4, num_kept=1)
    assert store.before(5) == [4]


def test_sweeping_deletes_half_written_folders_alone(store: CheckpointStore, tmp_path: Path) -> None:
    store.sweep()
    folder = store.save(7, SAVE)
    half = tmp_path / "first" / ".draft-000008-abc"
    half.mkdir()
    (half / STATE_FILE).write_bytes(b"half")
    store.sweep()
    assert list((tmp_path / "first").iterdir()) == [folder]


def test_saving_a_version_again_replaces_it(store: CheckpointStore) -> None:
    store.save(7, SAVE)
    store.save(7, partial(write_whole, {"model.a": torch.zeros(2)}))
    assert whole_state(store, 7)["model.a"].tolist() == [0, 0]


def test_failed_save_leaves_the_earlier_ones(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(7, SAVE)
    with pytest.raises(RuntimeError):
        store.save(8, partial(write_whole, {"a": STATE["model.a"], "b": STATE["model.a"]}))
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["000007"]
    assert torch.equal(whole_state(store, 7)["model.a"], STATE["model.a"])


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    match how:
        case "flip":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            file.write_bytes(content[:-1])
        case "remove":
            file.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", [STATE_FILE, "manifest.json"])
def test_damage_is_refused_with_the_folder_and_the_file(store: CheckpointStore, name: str, how: str) -> None:
    store.save(6, SAVE)
    folder = store.save(7, SAVE)
    damage(folder / name, how)
    with pytest.raises(CheckpointDamaged, match=f"checkpoint {folder}: .*{name}"):
        store.load(7)


def test_checkpoint_of_a_run_that_has_only_the_name_in_common_is_refused_with_both_databases(tmp_path: Path) -> None:
    mine = Owner(run="run-a", made_at="2026-01-02T03:04:05.000006", database="postgresql://rl:***@a/one")
    other = Owner(run="run-a", made_at="2026-01-02T03:04:05.000007", database="postgresql://rl:***@b/two")
    moved = Owner(run="run-a", made_at=mine.made_at, database="postgresql://rl:***@c/restored")
    CheckpointStore(tmp_path, "run-a").save(1, SAVE)
    folder = CheckpointStore(tmp_path, "run-a", owner=mine).save(2, SAVE)
    CheckpointStore(tmp_path, "run-a", owner=moved).check_owner()
    with pytest.raises(SetupError) as refused:
        CheckpointStore(tmp_path, "run-a", owner=other).check_owner()
    assert str(refused.value).startswith(
        f"{folder} is of run run-a of database {mine.database}, made {mine.made_at}, and this is run run-a of "
        f"database {other.database}, made {other.made_at}: "
    )
    (folder / STATE_FILE).write_bytes(b"nothing")
    CheckpointStore(tmp_path, "run-a", owner=other).check_owner()


def test_only_the_checkpoints_of_others_are_named_to_be_deleted(tmp_path: Path) -> None:
    theirs = Owner(run="theirs", made_at="2026-01-02T03:04:05.000006", database="postgresql://rl:***@a/one")
    mine = Owner(run="mine", made_at="2026-01-02T03:04:05.000007", database=theirs.database)
    folder = tmp_path / "mine"
    CheckpointStore(tmp_path, "theirs", owner=theirs).save(4, SAVE)
    CheckpointStore(tmp_path, "mine", owner=mine).save(7, SAVE)
    for foreign in ("000006", "000008"):
        shutil.copytree(tmp_path / "theirs" / "000004", folder / foreign)
    with pytest.raises(SetupError) as refused:
        CheckpointStore(tmp_path, "mine", owner=mine).check_owner()
    assert str(refused.value).endswith(
        f": take another name or ROLLMILL_DATA_DIR, or delete {folder / '000006'} and {folder / '000008'} if nobody "
        "goes on with that run"
    )


def test_checkpoint_that_came_from_a_run_of_another_name_is_refused_with_both_names(tmp_path: Path) -> None:
    theirs = Owner(run="theirs", made_at="2026-01-02T03:04:05.000006", database="postgresql://rl:***@a/one")
    CheckpointStore(tmp_path, "theirs", owner=theirs).save(2, SAVE)
    (tmp_path / "theirs").rename(tmp_path / "mine")
    mine = Owner(run="mine", made_at="2026-01-02T03:04:05.000007", database=theirs.database)
    with pytest.raises(SetupError, match=r"000002 is of run theirs of .* and this is run mine of "):
        CheckpointStore(tmp_path, "mine", owner=mine).check_owner()
