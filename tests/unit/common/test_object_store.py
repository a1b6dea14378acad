from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

from common.errors import SetupError
from common.object_store import ObjectStore, fetch, open_store
from common.weights import MANIFEST, WeightsDamaged, WeightStore, WeightsUnavailable, verify
from tests.version_files import writing


def write_files(folder: Path) -> None:
    for number in range(3):
        (folder / f"shard-{number}.bin").write_bytes(bytes([number]) * 1000)
    (folder / "config.json").write_text("{}")


class Away(MemoryFileSystem):
    """A store whose network is down."""

    protocol = "away"

    def _open(self, path: str, *args: object, **kwargs: object) -> object:
        raise ConnectionError("no route to host")

    def cat_file(self, path: str, *args: object, **kwargs: object) -> bytes:
        raise TimeoutError("connect timed out")

    def put_file(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("a driver's own kind of error")


class Deadly(LocalFileSystem):
    """Its process is killed when the second file has arrived; others may be on their way."""

    protocol = "deadly"
    num_put = 0

    def put_file(self, *args: object, **kwargs: object) -> None:
        super().put_file(*args, **kwargs)
        Deadly.num_put += 1
        if Deadly.num_put == 2:
            os.kill(os.getpid(), signal.SIGKILL)


register_implementation("away", Away, clobber=True)
register_implementation("deadly", Deadly, clobber=True)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    yield ObjectStore(f"file://{tmp_path}/store" if request.param == "file" else "memory://bucket/prefix")
    MemoryFileSystem.store.clear()


def path_in_memory(location: str, name: str) -> str:
    return f"{location.removeprefix('memory:/')}/{name}"


def test_what_is_published_is_fetched_whole(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 7, write_files)
    assert published.location.startswith(f"{store.url}/run/000007-")
    store.check(published.location, published.manifest_sha256)
    draft = tmp_path / "draft"
    draft.mkdir()
    fetch(published.location, published.manifest_sha256, draft)
    assert len(verify(draft, published.manifest_sha256).files) == 4
    assert (draft / "shard-2.bin").read_bytes() == b"\2" * 1000


def test_the_same_weights_have_one_place_and_others_another(store: ObjectStore) -> None:
    first = store.publish("run", 1, write_files)
    assert store.publish("run", 1, write_files) == first
    other = store.publish("run", 1, writing("config.json", b"{ }"))
    assert other.location != first.location
    store.check(first.location, first.manifest_sha256)
    store.check(other.location, other.manifest_sha256)


def test_a_failed_write_sends_nothing(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/store")

    def fail(folder: Path) -> None:
        write_files(folder)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        store.publish("run", 1, fail)
    assert not (tmp_path / "store").exists()


def publish_and_die(root: Path) -> None:
    ObjectStore(f"deadly://{root}").publish("run", 1, write_files)


def test_a_trainer_killed_while_it_publishes_leaves_no_version_and_what_is_left_is_pruned(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=publish_and_die, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (left,) = (tmp_path / "run").iterdir()
    assert len(list(left.iterdir())) >= 2
    assert not (left / MANIFEST).exists()
    store = ObjectStore(f"file://{tmp_path}")
    with pytest.raises(WeightsDamaged, match=rf"{left.name}/{MANIFEST} is missing"):
        store.check(f"file://{left}", "0" * 64)
    published = store.publish("run", 1, write_files)
    assert published.location == f"file://{left}", "the replayed step fills up what its first try left"
    store.check(published.location, published.manifest_sha256)
    (tmp_path / "run" / "000000-0123").mkdir()
    (tmp_path / "run" / "000001-abcd").mkdir()
    assert store.prune("run", keep_from=2) == [1]
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["000000-0123"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda files, path: files.rm_file(path("shard-1.bin")), r"000001-\w+/shard-1.bin is missing"),
        (lambda files, path: files.pipe_file(path("shard-1.bin"), b"\1" * 999), "999 bytes, published were 1000"),
        (
            lambda files, path: files.pipe_file(path("shard-1.bin"), b"\2" * 1000),
            "shard-1.bin has sha256 [0-9a-f]{12}…",
        ),
        (lambda files, path: files.pipe_file(path(MANIFEST), b"{}"), "manifest.json has sha256 [0-9a-f]{12}…"),
        (lambda files, path: files.rm_file(path(MANIFEST)), "manifest.json is missing"),
    ],
)
def test_damage_is_found_while_fetching_and_named(damage, expected: str, tmp_path: Path) -> None:
    published = ObjectStore("memory://bucket").publish("run", 1, write_files)
    damage(MemoryFileSystem(), lambda name: path_in_memory(published.location, name))
    with pytest.raises(WeightsDamaged, match=expected):
        fetch(published.location, published.manifest_sha256, tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def test_a_check_finds_what_is_missing_or_cut_short_without_fetching() -> None:
    store = ObjectStore("memory://bucket")
    published = store.publish("run", 2, write_files)
    MemoryFileSystem().pipe_file(path_in_memory(published.location, "shard-0.bin"), b"\0" * 10)
    with pytest.raises(WeightsDamaged, match=r"shard-0\.bin has 10 bytes, published were 1000"):
        store.check(published.location, published.manifest_sha256)
    MemoryFileSystem().rm_file(path_in_memory(published.location, "shard-0.bin"))
    with pytest.raises(WeightsDamaged, match=r"shard-0\.bin is missing"):
        store.check(published.location, published.manifest_sha256)


def test_a_version_of_another_store_is_published_anew(tmp_path: Path) -> None:
    folders, objects = WeightStore(tmp_path), ObjectStore("memory://bucket")
    in_folder, in_bucket = folders.publish("run", 1, write_files), objects.publish("run", 1, write_files)
    with pytest.raises(WeightsDamaged, match=f"{in_folder.location} does not lie below memory://bucket"):
        objects.check(in_folder.location, in_folder.manifest_sha256)
    with pytest.raises(WeightsDamaged, match=f"does not lie in folder {tmp_path}"):
        folders.check(in_bucket.location, in_bucket.manifest_sha256)


def test_a_store_that_is_away_is_no_damage(tmp_path: Path) -> None:
    store = ObjectStore("away://bucket")
    with pytest.raises(WeightsUnavailable, match="away://bucket cannot be reached: RuntimeError: a driver's own"):
        store.publish("run", 1, write_files)
    with pytest.raises(WeightsUnavailable, match=r"manifest.json cannot be reached: TimeoutError: connect timed out"):
        fetch("away://bucket/run/000001-aa", "0" * 64, tmp_path)


def test_passwords_in_a_url_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable) as caught:
        fetch("away://me:secret@bucket/run/000001-aa", "0" * 64, tmp_path)
    assert "secret" not in str(caught.value)


def test_pruning_keeps_the_start_weights_the_window_and_what_is_needed(store: ObjectStore) -> None:
    published = [store.publish("run", number, write_files) for number in range(6)]
    other = store.publish("run-b", 1, write_files)
    assert store.prune("run", keep_from=4, keep={2}) == [1, 3]
    for number in (0, 2, 4, 5):
        store.check(published[number].location, published[number].manifest_sha256)
    for number in (1, 3):
        with pytest.raises(WeightsDamaged, match="missing"):
            store.check(published[number].location, published[number].manifest_sha256)
    store.check(other.location, other.manifest_sha256)
    assert store.prune("run", keep_from=4, keep={2}) == []


def test_the_setting_chooses_the_store(tmp_path: Path) -> None:
    assert isinstance(open_store(None, folder=tmp_path), WeightStore)
    assert isinstance(open_store("memory://bucket", folder=tmp_path), ObjectStore)
    with pytest.raises(SetupError, match="ROLLMILL_WEIGHTS_URL=nowhere://x: Protocol not known: nowhere"):
        open_store("nowhere://x", folder=tmp_path)
