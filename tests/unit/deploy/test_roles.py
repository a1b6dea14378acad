from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import SetupError
from deploy.roles import read_passwords


def written(path: Path, text: str, *, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_passwords_are_read_by_role(tmp_path: Path) -> None:
    file = written(tmp_path / "roles", "rollmill_run one\n\nrollmill_eval  two\n")
    assert read_passwords(file) == {"rollmill_run": "one", "rollmill_eval": "two"}


def test_no_file_holds_no_passwords(tmp_path: Path) -> None:
    assert read_passwords(tmp_path / "none") == {}


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "roles", "rollmill_run one\n", mode=0o640)
    with pytest.raises(SetupError, match=f"may be read by others: `chmod 600 {file}`"):
        read_passwords(file)


def test_a_malformed_line_is_named_without_showing_it(tmp_path: Path) -> None:
    file = written(tmp_path / "roles", "rollmill_run one\nsecret\n")
    with pytest.raises(SetupError, match="line 2 is not of the form") as caught:
        read_passwords(file)
    assert "secret" not in str(caught.value)
