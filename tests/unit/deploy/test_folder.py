from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import SetupError
from deploy.folder import DataFolder, FolderInUse, kept_password, write_private

HOLD = """
import sys
from pathlib import Path
from deploy.folder import DataFolder
with DataFolder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_start_on_the_same_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        in_use = rf"{tmp_path} is in use by process {holder.pid} \(-c {tmp_path}\): wait until it has ended or stop it"
        with pytest.raises(SetupError, match=in_use):
            DataFolder(tmp_path).__enter__()
        holder.kill()
    with DataFolder(tmp_path):
        assert (tmp_path / "run" / "lock").read_text().startswith(f"{os.getpid()} (")


@pytest.mark.parametrize("left_behind", ["", f"{2**31 - 1} (rollmill up)"], ids=["nothing", "one that was killed"])
def test_a_holder_that_has_not_yet_written_its_name_is_waited_for(left_behind: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(left_behind)
        lock.flush()
        refused = pool.submit(DataFolder(tmp_path).__enter__)
        with pytest.raises(TimeoutError):
            refused.result(timeout=0.5)
        lock.truncate(0)
        lock.seek(0)
        lock.write(f"{os.getpid()} (rollmill sql)")
        lock.flush()
        error = refused.exception(timeout=60)
    assert isinstance(error, FolderInUse)
    assert error.holder == f"{os.getpid()} (rollmill sql)"


@pytest.mark.parametrize("argument", ["x" * 5000, "ü" * 5000, "two\nlines", "a\udcff"])
def test_a_holder_is_one_line_whatever_its_arguments(argument: str, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUse) as raised:
            DataFolder(tmp_path).__enter__()
        holder.kill()
    assert re.fullmatch(rf"{holder.pid} \(.{{2,120}}\)", raised.value.holder)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/data is not writable .*ROLLMILL_DATA_DIR"):
        DataFolder(tmp_path / "file" / "data").__enter__()


def test_a_full_disk_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"only \d+ MB free .* 1000000000000 MB are needed"):
        DataFolder(tmp_path, min_free_bytes=10**18).__enter__()
    with DataFolder(tmp_path):
        pass


def test_private_files_are_readable_by_us_alone_and_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "conf"
    for text in ("first", "second"):
        write_private(file, text)
        assert file.read_text() == text
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_password_is_kept(tmp_path: Path) -> None:
    password = kept_password(tmp_path / "password")
    assert len(password) == 32
    assert kept_password(tmp_path / "password") == password
    assert kept_password(tmp_path / "other") != password
