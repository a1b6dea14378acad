from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from common.db.snapshot import EpisodeFailure
from deploy.display import open_display, plain_line, render
from deploy.progress import Rates, View
from deploy.supervisor import State
from tests.unit.deploy.samples import make_process, make_snapshot, make_view


def text_of(view: View, *, width: int = 100) -> str:
    console = Console(record=True, width=width, file=StringIO())
    console.print(render(view))
    return console.export_text()


def line_with(text: str, start: str) -> str:
    """The words of the panel's line that begins so, with single spaces."""
    lines = (" ".join(line.strip("│ ").split()) for line in text.splitlines())
    return next(line for line in lines if line.startswith(start))


def test_panel_tells_which_run_it_is() -> None:
    first = text_of(make_view()).splitlines()[0]
    assert "demo-shell-seed7 · handler shell · seed 7 · 1:05" in first


def test_panel_shows_versions_reward_staleness_and_rates() -> None:
    text = text_of(make_view())
    assert re.fullmatch(r"policy version 10 of 40 [━╸╺]+ 1:30 to go", line_with(text, "policy version"))
    assert line_with(text, "mean reward") == "mean reward 0.80 at version 8 ▁▁▂▂▃▄▅▆▆"
    assert line_with(text, "staleness") == "staleness 0 in the last step largest 1, bound 1; engines serve 9"
    assert line_with(text, "throughput") == "throughput 1,234 tokens/s 23.5 episodes/s, 45,678 tokens so far"


def test_panel_shows_each_stage_and_the_groups() -> None:
    text = text_of(make_view())
    assert line_with(text, "INIT") == "INIT 11 12 1,300"
    assert line_with(text, "RUN") == "RUN 21 22 1,257"
    assert line_with(text, "EVAL") == "EVAL 31 32 1,194"
    assert line_with(text, "groups") == ("groups open 9 complete 0 taken 0 trained 160 dropped 2 3 episodes failed")


def test_panel_names_processes_that_are_not_up_and_those_that_were_restarted() -> None:
    healthy = line_with(text_of(make_view()), "processes")
    assert healthy == "processes 2 of 2 up restarts 0"
    ill = make_view(
        processes=(make_process("engine", restarts=2), make_process("trainer", state=State.WAITING, restarts=1))
    )
    assert line_with(text_of(ill), "processes") == ("processes 1 of 2 up trainer waiting restarts engine 2, trainer 1")


def test_panel_and_plain_line_say_how_each_process_ended_the_last_time() -> None:
    killed = make_process("engine", restarts=2, last_exit="was killed by SIGKILL")
    failed = make_process(
        "trainer", state=State.WAITING, last_exit="ended with exit code 2", last_words="no such layer: [q_prjo]"
    )
    finished = make_process("once", state=State.FINISHED, last_exit="ended with exit code 0")
    view = make_view(processes=(killed, failed, finished))
    lines = [" ".join(line.strip("│ ").split()) for line in text_of(view).splitlines()]
    after = lines.index("processes 1 of 3 up trainer waiting restarts engine 2") + 1
    ends = ["engine was killed by SIGKILL", "trainer ended with exit code 2: no such layer: [q_prjo]"]
    assert lines[after : after + 2] == ends
    assert lines[after + 2].startswith("data ")
    assert plain_line(view).endswith("  ".join(["restarts 2", *ends]))


def test_panel_says_where_data_and_logs_are() -> None:
    assert line_with(text_of(make_view()), "data") == "data /data logs /data/logs"


def test_panel_waits_for_the_first_figures() -> None:
    nothing = make_view(snapshot=None, rates=Rates(tokens_per_s=None, episodes_per_s=None, eta_s=None))
    assert line_with(text_of(nothing), "policy version") == "policy version waiting for the first figures"


def test_panel_shows_a_run_before_its_first_version() -> None:
    begun = make_view(
        snapshot=make_snapshot(version_newest=None, version_live=None, lag_last=None, lag_max=None, rewards=()),
        rates=Rates(tokens_per_s=None, episodes_per_s=None, eta_s=None),
    )
    text = text_of(begun)
    assert line_with(text, "policy version").startswith("policy version - of 40")
    assert line_with(text, "mean reward") == "mean reward -"
    assert line_with(text, "staleness").startswith("staleness - in the last step largest -, bound 1")
    assert line_with(text, "throughput").startswith("throughput - tokens/s - episodes/s")


def test_panel_keeps_the_last_figures_and_says_so_when_the_database_is_away() -> None:
    text = text_of(make_view(problem="the database does not answer: figures are 4 s old"))
    assert line_with(text, "the database") == "the database does not answer: figures are 4 s old"
    assert line_with(text, "INIT") == "INIT 11 12 1,300"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_panel_fits_the_terminal(width: int) -> None:
    lines = text_of(make_view(), width=width).splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) <= 20


def test_nothing_is_cut_on_a_terminal_of_80_columns() -> None:
    assert "…" not in text_of(make_view(), width=80)


def test_plain_line_has_the_same_figures() -> None:
    assert plain_line(make_view()) == (
        "[1:05]  version 10/40  reward 0.80  lag 0  waiting+working init=11+12 run=21+22 eval=31+32  "
        "scored 1194  failed 3  1,234 tokens/s"
    )


def test_plain_line_mentions_restarts_and_problems() -> None:
    line = plain_line(make_view(processes=(make_process("engine", restarts=2),), problem="look here"))
    assert line.endswith("restarts 2  ! look here")


def test_panel_and_plain_line_show_the_last_failure_on_one_line() -> None:
    failure = EpisodeFailure(episode_id=17, why="handler_failed: run of my:Tool: RuntimeError:\n [boom]")
    failed = make_view(snapshot=make_snapshot(last_failure=failure))
    expected = "last failure: episode 17: handler_failed: run of my:Tool: RuntimeError: [boom]"
    assert line_with(text_of(failed), "last failure") == expected
    assert plain_line(failed).endswith(f"  {expected}")
    assert "last failure" not in plain_line(make_view())


def test_without_a_terminal_the_first_and_the_last_frame_are_lines() -> None:
    console = Console(file=StringIO(), force_terminal=False, width=40)
    with open_display(console) as display:
        for elapsed_s in (1.0, 2.0, 3.0):
            display.show(make_view(elapsed_s=elapsed_s, snapshot=None))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "[0:01]  waiting for the first figures",
        "[0:03]  waiting for the first figures",
    ]


def test_on_a_terminal_the_last_frame_stays() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100, height=40, _environ={"TERM": "xterm"})
    with open_display(console) as display:
        display.show(make_view())
        display.show(make_view(snapshot=make_snapshot(version_newest=40)))
    assert isinstance(console.file, StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert plain.index("10 of 40") < plain.index("40 of 40")
