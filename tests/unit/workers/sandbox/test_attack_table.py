from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[4] / "docs" / "sandbox.md"


def test_the_table_of_attacks_has_a_row_for_each() -> None:
    lines = DOCS.read_text().partition("## Attacks")[2].splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    files = ("test_attacks.py", "test_network_attacks.py")
    attacks = "".join(Path(__file__).with_name(name).read_text() for name in files)
    assert rows == [name.replace("_", " ") for name in re.findall(r"def test_(\w+)", attacks)]
