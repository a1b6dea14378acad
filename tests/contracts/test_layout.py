from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

OURS = ("common", "workers", "trainer", "deploy", "migrations")


def test_our_package_names_belong_to_our_distribution_alone(repository: Path):
    owners = importlib.metadata.packages_distributions()
    for name in OURS:
        assert set(owners.get(name, ["rollmill"])) == {"rollmill"}
        assert Path(str(importlib.import_module(name).__file__)).is_relative_to(repository)


@pytest.mark.parametrize(
    "module", ["workers.fleet", "workers.feeder", "workers.reaper", "deploy.cli", "trainer.__main__"]
)
def test_entry_points_import_no_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
