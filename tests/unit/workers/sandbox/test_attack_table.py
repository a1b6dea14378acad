from __future__ import annotations

import re
from pathlib import Path

from tests.unit.workers.sandbox.test_evaluator_cheats import CHEATS, IN_CONTAINERS

DOCS = Path(__file__).parents[4] / "docs" / "sandbox.md"


def rows_below(heading: str) -> list[str]:
    """The first cells of the table below a heading."""
    lines = DOCS.read_text().partition(heading)[2].partition("\n## ")[0].splitlines()
    return [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]


def test_the_table_of_attacks_has_a_row_for_each() -> None:
    files = ("test_attacks.py", "test_network_attacks.py")
    attacks = "".join(Path(__file__).with_name(name).read_text() for name in files)
    assert rows_below("## Attacks") == [name.replace("_", " ") for name in re.findall(r"def test_(\w+)", attacks)]


def test_the_table_of_cheats_has_a_row_for_each() -> None:
    cheats = [f"{name} *" if name in IN_CONTAINERS else name for name in CHEATS]
    assert rows_below('"Stopped" = every test failed') == cheats
