"""The list of engines on a terminal and in a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from common.db.engines import EngineStatus
from common.episode import EngineState
from deploy.tables import PIPE_WIDTH, print_engines

URL = "http://127.0.0.1:54321"
WHY = "it has a context of 60 ids\nand the run needs 512, " + "which is more " * 20 + "than that"


def engine(**changes: object) -> EngineStatus:
    known: dict[str, object] = {
        "url": URL,
        "run": "calculator-of-monday-3",
        "state": EngineState.QUARANTINED,
        "version": 112,
        "newest": 114,
        "wire": "vllm-completions",
        "healthy_s": 12.0,
        "error": None,
        "num_loads": 113,
        "num_refusals": 10,
        "num_failures": 17,
    }
    return EngineStatus(**known | changes)  # type: ignore[arg-type]


def shown(*found: EngineStatus, width: int, terminal: bool) -> list[str]:
    said = io.StringIO()
    print_engines(found, console=Console(file=said, width=width, force_terminal=terminal, color_system=None))
    return [line.rstrip("\n") for line in said.getvalue().splitlines()]


def test_a_reason_takes_no_room_from_the_columns_of_a_terminal() -> None:
    lines = shown(engine(error=WHY), engine(url="http://10.0.0.1:8000"), width=100, terminal=True)
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if "http://" in line]
    assert rows[0][:1] + rows[0][2:6] == [URL, "quarantined", "112", "of", "114"]
    assert rows[1][:1] + rows[1][2:6] == ["http://10.0.0.1:8000", "quarantined", "112", "of", "114"]
    assert [row[-3:] for row in rows[:2]] == [["113", "10", "17"]] * 2
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{URL}: it has a context"))
    assert " ".join(" ".join(lines[start:]).split()) == f"{URL}: {' '.join(WHY.split())}"
    assert "…" not in "".join(lines)


def test_in_a_pipe_a_reason_is_one_line_and_pads_no_other() -> None:
    why = WHY + " and so on" * 100
    without = shown(engine(), width=PIPE_WIDTH, terminal=False)
    lines = shown(engine(error=f"engine {URL}: {why}"), width=PIPE_WIDTH, terminal=False)
    assert lines == [*without, f"{URL}: {' '.join(why.split())}"]
    assert max(map(len, without)) < 140
