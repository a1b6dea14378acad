from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.weights import WeightsDamaged, WeightStore, parse_version_name, verify, version_name


@contextmanager
def opened_folders() -> Iterator[set[Path]]:
    """Folders that are opened within the block by path and without a mode, as is done for fsync alone."""
    opened, listening = set[Path](), True

    def see(name: str, arguments: tuple[object, ...]) -> None:
        if listening and name == "open" and isinstance(arguments[0], str) and arguments[1] is None:
            opened.add(Path(arguments[0]))

    # Python keeps it for good.
    sys.addaudithook(see)
    try:
        yield opened
    finally:
        listening = False


def write_tensors(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
    (folder / "config.json").write_text("{}")


def test_a_version_is_whole_and_verifies(tmp_path: Path):
    published = WeightStore(tmp_path).publish("run", 7, write_tensors)
    assert published.path == tmp_path / "run" / "000007"
    manifest = verify(published.path, published.manifest_sha256)
    assert manifest.tensors["w"].shape == (2,)
    assert set(manifest.files) == {"config.json", "model.safetensors"}


def test_folders_that_a_version_is_the_first_in_are_on_the_disk_with_it(tmp_path: Path):
    root = tmp_path / "weights"
    with opened_folders() as synced:
        WeightStore(root).publish("run", 1, write_tensors)
    assert {tmp_path, root, root / "run"} <= synced


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    def fail(folder: Path) -> None:
        write_tensors(folder)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        WeightStore(tmp_path).publish("run", 1, fail)
    assert list((tmp_path / "run").iterdir()) == []


def test_publishing_a_number_again_replaces_the_folder(tmp_path: Path):
    store = WeightStore(tmp_path)
    (store.publish("run", 1, write_tensors).path / "stray").write_text("x")
    published = store.publish("run", 1, write_tensors)
    assert not (published.path / "stray").exists()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: _truncate(folder / "model.safetensors"), r"model.safetensors has \d+ bytes, published were"),
        (lambda folder: _flip(folder / "model.safetensors"), "model.safetensors has sha256"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: _flip(folder / "manifest.json"), "manifest.json has sha256"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage, expected: str):
    published = WeightStore(tmp_path).publish("run", 1, write_tensors)
    damage(published.path)
    with pytest.raises(WeightsDamaged, match=expected):
        verify(published.path, published.manifest_sha256)


def test_pruning_keeps_the_start_weights_and_the_window(tmp_path: Path):
    store = WeightStore(tmp_path)
    for number in range(5):
        store.publish("run", number, write_tensors)
    assert store.prune("run", keep_from=3) == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["000000", "000003", "000004"]


def test_version_names_carry_the_run():
    assert parse_version_name(version_name("a/b", 12)) == ("a/b", 12)
    assert parse_version_name("default") is None
    assert parse_version_name("/000001") is None
