from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import EpisodeError, SetupError
from common.outcomes import Outcome
from workers.sandbox.backend import FolderBackend
from workers.sandbox.folder import SandboxFolders, remove_tree

HANDLE = "7-1"


def test_files_are_written_as_given(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {"a": "é\r\n", "b/c/d.txt": ""})
    assert (folders.path(HANDLE) / "a").read_bytes() == "é\r\n".encode()
    assert (folders.path(HANDLE) / "b/c/d.txt").read_bytes() == b""


def test_making_it_again_leaves_nothing_of_the_first(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {"old": "x"})
    folders.create(HANDLE, {"new": "y"})
    assert [path.name for path in folders.path(HANDLE).iterdir()] == ["new"]


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/x", "../x", "a/../b", "a/..", "a//b", "a/", "./a", "a\0b"])
def test_odd_names_are_refused(folders: SandboxFolders, name: str) -> None:
    with pytest.raises(EpisodeError, match="plain relative path") as caught:
        folders.create(HANDLE, {name: "x"})
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)
    assert not folders.path(HANDLE).exists()


@pytest.mark.parametrize("files", [{"a": "x", "a/b": "y"}, {"a/b": "x", "a": "y"}])
def test_a_file_that_is_also_a_folder_is_refused(folders: SandboxFolders, files: dict[str, str]) -> None:
    with pytest.raises(EpisodeError) as caught:
        folders.create(HANDLE, files)
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)


def test_a_disk_that_refuses_is_no_fault_of_the_handler(folders: SandboxFolders) -> None:
    with pytest.raises(EpisodeError) as caught:
        folders.create(HANDLE, {"x" * 300: "too long a name for any file system"})
    assert caught.value.outcome is Outcome.SANDBOX_FAILED


@pytest.mark.parametrize("handle", ["", "..", "7", "7-1/..", "../7-1", "/7-1", "7-1\n", "a-b", "7-1-1"])
def test_only_handles_name_folders(folders: SandboxFolders, handle: str) -> None:
    with pytest.raises(ValueError, match="no sandbox handle"):
        folders.destroy(handle)


def test_a_link_in_its_place_is_no_sandbox(folders: SandboxFolders, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folders.path(HANDLE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EpisodeError, match="is gone"):
        folders.require(HANDLE)


def test_the_root_is_closed_to_others(folders: SandboxFolders) -> None:
    assert folders.root.stat().st_mode & 0o777 == 0o700


def test_a_root_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SetupError, match="ROLLMILL_DATA_DIR"):
        SandboxFolders.below(tmp_path / "taken")


def test_destroying_twice_is_no_error(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {"a/b": "x"})
    folders.destroy(HANDLE)
    folders.destroy(HANDLE)
    assert not folders.path(HANDLE).exists()


def test_removal_does_not_follow_links(folders: SandboxFolders, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o750)
    (kept / "file").write_text("precious")
    folders.create(HANDLE, {"sub/x": "x"})
    for place in (folders.path(HANDLE), folders.path(HANDLE) / "sub"):
        (place / "folder-link").symlink_to(kept)
        (place / "file-link").symlink_to(kept / "file")
        (place / "dangling").symlink_to("/nowhere")
        (place / "loop").symlink_to("loop")
        os.link(kept / "file", place / "hard")
        os.mkfifo(place / "pipe")
    folders.destroy(HANDLE)
    assert (kept / "file").read_text() == "precious"
    assert kept.stat().st_mode & 0o777 == 0o750
    assert not folders.path(HANDLE).exists()


def test_a_link_in_place_of_the_folder_is_not_followed(folders: SandboxFolders, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    folders.path(HANDLE).symlink_to(kept)
    with pytest.raises(EpisodeError, match="cannot remove"):
        folders.destroy(HANDLE)
    assert (kept / "file").read_text() == "precious"


def test_names_of_its_own_do_not_stop_the_removal(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {f".removing-{number}/.removing-{number}/a/b": "x" for number in range(1, 5)})
    folders.destroy(HANDLE)
    assert not folders.path(HANDLE).exists()


def test_removal_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")


def test_a_tree_deeper_than_any_path_or_stack_is_removed(folders: SandboxFolders) -> None:
    folders.create(HANDLE, {})
    folder = os.open(folders.path(HANDLE), os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("n", dir_fd=folder)
        inner = os.open("n", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    folders.destroy(HANDLE)
    assert not folders.path(HANDLE).exists()


async def test_removal_survives_what_an_agent_left(backend: FolderBackend, folders: SandboxFolders) -> None:
    backend.create(HANDLE, {"a/b/c": "x", "d/e": "y"})
    session = backend.attach(HANDLE)
    odd = r"mkdir -p $'odd\377name/\n/-rf'; touch $'odd\377name/*'; mkdir locked; touch locked/x"
    modes = "chmod 000 locked a/b a d/e d; chmod 000 ."
    for command in (odd, modes):
        result = await session.exec(command, timeout_s=60)
        assert result.exit_code == 0, result
    await session.close()
    backend.destroy(HANDLE)
    assert not folders.path(HANDLE).exists()


def test_several_reapers_may_remove_the_same_folder(folders: SandboxFolders) -> None:
    with ThreadPoolExecutor(4) as reapers:
        for number in range(1, 60):
            handle = f"{number}-1"
            folders.create(handle, {"a": "x", "b/c": "y"})
            assert list(reapers.map(folders.destroy, [handle] * 4)) == [None] * 4
            assert not folders.path(handle).exists()
