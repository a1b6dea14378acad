"""A model's folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import SetupError
from common.weights import fsync, fsync_folder


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """An empty folder beside `target`, which becomes `target` when the block ends well, and else goes.

    With `replace` a model that is there already gives way at the end, with all that lies in its folder. Raises
    SetupError, before the block, when something is there that may not be replaced. A process that is killed outright
    leaves the hidden draft, and at worst, between two renames, the replaced model in a hidden folder beside it.
    """
    target = target.resolve()
    _check_free(target, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and on the same file system, or it could not be renamed.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    draft, replaced = work / "draft", work / "replaced"
    try:
        draft.mkdir()
        yield draft
        _check_free(target, replace=replace)
        for file in draft.iterdir():
            # safetensors makes its files for their owner alone; engines may run as another user.
            file.chmod(0o644)
        fsync_folder(draft)
        if target.exists():
            target.rename(replaced)
        draft.rename(target)
        fsync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_free(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise SetupError(f"{target} is a file, not a folder: take another --out")
    if not any(target.iterdir()):
        return
    if not replace:
        raise SetupError(f"{target} is there already: take another --out, or --force to replace it")
    if not (target / "config.json").is_file():
        raise SetupError(f"{target} holds no model (no config.json), so --force does not replace it")
