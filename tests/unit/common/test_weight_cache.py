from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation

from common.object_store import ObjectStore
from common.weight_cache import NUM_KEPT, WeightCache
from common.weights import MANIFEST, Published, WeightsDamaged, WeightStore, WeightsUnavailable, verify
from tests import version_files


class Counted(LocalFileSystem):
    """Writes a line for each file that is fetched."""

    protocol = "counted"

    def open(self, path: str, *args: object, **kwargs: object) -> object:
        with Path(os.environ["COUNT_FETCHES_IN"]).open("a") as log:
            log.write(f"{path}\n")
        return super().open(path, *args, **kwargs)


class Deadly(LocalFileSystem):
    """The process that fetches is killed at the first file."""

    protocol = "lethal"

    def open(self, path: str, *args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


register_implementation("counted", Counted, clobber=True)
register_implementation("lethal", Deadly, clobber=True)


def writing(number: int) -> Callable[[Path], None]:
    return version_files.writing("model.bin", bytes([number]) * 1000)


def get(cache: WeightCache, published: Published, *, named: tuple[str, ...] = ()) -> Path:
    return cache.folder(published.location, published.manifest_sha256, named=lambda: named)


def versions_in(cache: Path) -> list[str]:
    return sorted(entry.name.partition("-")[0] for entry in cache.iterdir() if entry.is_dir())


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store")


def test_a_version_in_a_folder_stays_where_it_lies(tmp_path: Path) -> None:
    published = WeightStore(tmp_path / "weights").publish("run", 1, writing(1))
    assert get(WeightCache(tmp_path / "cache"), published) == published.path
    assert not (tmp_path / "cache").exists()
    (published.path / "model.bin").write_bytes(b"?")
    with pytest.raises(WeightsDamaged, match=r"model\.bin has 1 bytes"):
        get(WeightCache(tmp_path / "cache"), published)


def test_a_version_behind_a_url_is_fetched_whole(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 1, writing(1))
    folder = get(WeightCache(tmp_path / "cache"), published)
    verify(folder, published.manifest_sha256)
    assert folder.stat().st_mode & 0o777 == 0o755, "the engine may be another user's"
    assert versions_in(tmp_path / "cache") == ["000001"]


def fetch_in_process(root: Path, published: Published) -> None:
    get(WeightCache(root), published)


def test_many_processes_fetch_once(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNT_FETCHES_IN", str(tmp_path / "log"))
    published = store.publish("run", 1, writing(1))
    counted = Published(
        location=published.location.replace("file://", "counted://"), manifest_sha256=published.manifest_sha256
    )
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch_in_process, args=(tmp_path / "cache", counted)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    fetched = (tmp_path / "log").read_text().splitlines()
    assert [line.rpartition("/")[2] for line in fetched if not line.endswith(MANIFEST)] == ["model.bin"]


def test_a_killed_fetch_holds_nobody_up_and_leaves_nothing(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 1, writing(1))
    deadly = Published(
        location=published.location.replace("file://", "lethal://"), manifest_sha256=published.manifest_sha256
    )
    process = multiprocessing.get_context("fork").Process(target=fetch_in_process, args=(tmp_path / "cache", deadly))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    (left,) = (entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())
    assert left.name.startswith(".draft-")
    verify(get(WeightCache(tmp_path / "cache", lock_wait_s=1), published), published.manifest_sha256)
    assert versions_in(tmp_path / "cache") == ["000001"]


def test_a_damaged_object_leaves_no_folder(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 1, writing(1))
    (Path(published.location.removeprefix("file://")) / "model.bin").write_bytes(b"\2" * 1000)
    with pytest.raises(WeightsDamaged, match=r"model\.bin has sha256"):
        get(WeightCache(tmp_path / "cache"), published)
    assert versions_in(tmp_path / "cache") == []


def test_a_folder_damaged_in_the_cache_is_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    cache, published = WeightCache(tmp_path / "cache"), store.publish("run", 1, writing(1))
    (get(cache, published) / "model.bin").write_bytes(b"\2" * 1000)
    verify(get(cache, published), published.manifest_sha256)


def test_a_number_published_anew_does_not_touch_the_folder_that_engines_loaded(
    store: ObjectStore, tmp_path: Path
) -> None:
    cache = WeightCache(tmp_path / "cache")
    first, second = (get(cache, store.publish("run", 1, writing(number))) for number in (1, 2))
    assert (first / "model.bin").read_bytes()[0] == 1
    assert (second / "model.bin").read_bytes()[0] == 2


def test_the_cache_is_bounded_and_keeps_what_engines_name(store: ObjectStore, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    published = [store.publish("run", number, writing(number)) for number in range(8)]
    named = (published[1].manifest_sha256,)
    for number, version in enumerate(published):
        folder = get(cache, version, named=named)
        os.utime(folder, (number, number))
    assert NUM_KEPT == 3
    assert versions_in(tmp_path / "cache") == ["000001", "000005", "000006", "000007"]
    verify(get(cache, published[0], named=named), published[0].manifest_sha256)
    assert versions_in(tmp_path / "cache") == ["000000", "000001", "000006", "000007"]


def test_a_lock_that_is_never_let_go_is_reported(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 1, writing(1))
    (tmp_path / "cache").mkdir()
    with (tmp_path / "cache" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WeightsUnavailable, match=r"another process holds .*lock for 0.2 s"):
            get(WeightCache(tmp_path / "cache", lock_wait_s=0.2), published)


def test_a_full_disk_is_the_store_s_trouble(store: ObjectStore, tmp_path: Path) -> None:
    published = store.publish("run", 1, writing(1))
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(WeightsUnavailable, match=r"weight cache .*cache: .*File exists"):
        get(WeightCache(tmp_path / "cache"), published)


def test_threads_of_one_process_fetch_one_after_the_other(store: ObjectStore, tmp_path: Path) -> None:
    cache, published = WeightCache(tmp_path / "cache"), store.publish("run", 1, writing(1))
    start = threading.Barrier(4)

    def fetch_together(_: int) -> Path:
        start.wait(10)
        return get(cache, published)

    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(fetch_together, range(4)))
    assert len(folders) == 1
    verify(folders.pop(), published.manifest_sha256)
