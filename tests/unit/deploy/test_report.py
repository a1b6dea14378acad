from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from common.db.examples import EXAMPLES, Answer
from common.db.step_troubles import StepTrouble
from common.errors import SetupError
from deploy.report import check_writable, to_json, write_json
from deploy.summary import figures, own_command, present
from deploy.tables import answer_table, short_cell, tab_separated
from tests.unit.deploy.samples import make_report, make_summary


def printed(renderable: object, *, width: int = 100) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_json_has_what_a_check_needs() -> None:
    document = json.loads(json.dumps(to_json(make_report().stopped(1.5))))
    assert document["run"] == "demo-shell-seed7"
    assert (document["seed"], document["handler"], document["lag_bound"]) == (7, "shell", 1)
    assert document["mean_reward_by_version"][:3] == [0.1, 0.2, 0.3]
    assert document["versions"] == list(range(41))
    expected = {
        "episodes_trained": 5120,
        "episodes_failed": 4,
        "episodes_stale": 16,
        "episodes_lost": 0,
        "episodes_left_out": 0,
        "groups_trained": 640,
        "groups_trained_zero_variance": 31,
        "lag_max": 1,
        "token_mismatches": 0,
        "logprob_gap_max": 3.14e-6,
        "tokens_sampled": 200_123,
        "restarts": {"engine": 0, "fleet-run": 2},
        "seconds": {"setup": 31.0, "start": 6.2, "train": 101.3, "stop": 1.5},
        "state": "FINISHED",
    }
    assert {name: document[name] for name in expected} == expected


def test_json_has_no_holes_where_nothing_was_sampled() -> None:
    report = make_report()
    holed = replace(report, summary=replace(report.summary, mean_reward_by_version=(0.1, None, 0.3, None)))
    document = to_json(holed)
    assert document["mean_reward_by_version"] == [0.1, 0.3]
    assert document["sampled_versions"] == [0, 2]


def test_json_of_a_run_looked_at_later_says_nothing_of_a_command() -> None:
    document = to_json(make_report(session=None))
    assert "seconds" not in document
    assert document["episodes_trained"] == 5120


def test_report_file_is_written_whole_and_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_json(make_report(), path)
    assert json.loads(path.read_text())["run"] == "demo-shell-seed7"
    assert list(tmp_path.iterdir()) == [path]


def test_report_file_that_cannot_be_written_is_found_out_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "report.json")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(SetupError, match=r"report file .* cannot be written: Is a directory"):
        check_writable(tmp_path)


def test_figures_sum_the_run_up() -> None:
    rows = dict(figures(make_report().stopped(1.5)))
    assert rows["policy versions"] == "40 of 40"
    assert rows["mean reward"] == "0.20 in the first 3 versions, [bold]0.88[/] in the last 5"
    assert rows["episodes"] == "5,140: 5,120 trained, 16 too stale, 4 failed"
    assert rows["groups trained"] == "640, 31 of them without variance"
    assert "left out of the loss" not in rows
    assert rows["trained unlike sampled"] == "[green]0 episodes[/]"
    assert rows["staleness"] == "largest 1, mean 0.43 versions, bound 1"
    assert rows["episodes ended by"] == "5,000 finished, 140 turn_limit"
    assert rows["attempts"] == "5,143 begun for 5,140 episodes"
    assert rows["handler's own errors"] == "1 time handler_failed"
    assert rows["infrastructure errors"] == "3 times lease_lost"
    assert rows["last failure"] == r"episode 17: handler_failed: run of my:Tool: KeyError: \[red]"
    assert rows["process restarts"] == "2 fleet-run"
    assert rows["seconds"] == "setup 31.0, start 6.2, train 101.3, stop 1.5"


def test_mean_reward_of_very_few_versions_is_put_in_words_that_fit() -> None:
    def words(*means: float | None) -> str:
        return dict(figures(make_report(summary=make_summary(mean_reward_by_version=means))))["mean reward"]

    assert words(0.25, None) == "[bold]0.25[/] in the one version that has scored episodes"
    assert words(0.25, 0.75) == "0.25 in the first version, [bold]0.75[/] in the last"
    assert words(0.0, 0.5, 1.0) == "0.00 in the first version, [bold]0.75[/] in the last 2"
    assert words(0.0, 0.5, None, 0.5, 1.0) == "0.25 in the first 2 versions, [bold]0.75[/] in the last 2"
    assert words(0, 0, 0, 1, 1, 1, 1) == "0.00 in the first 3 versions, [bold]1.00[/] in the last 4"


def test_figures_that_must_be_zero_and_are_not_stand_out() -> None:
    rows = dict(
        figures(make_report(summary=make_summary(token_mismatches=2, episodes_lost=1, episodes_trained_twice=2)))
    )
    assert rows["trained unlike sampled"] == "[bold red]2 episodes[/]"
    assert rows["lost, trained twice"] == "[bold red]3 episodes[/]"


def test_report_of_a_run_that_learned_nothing_says_what_took_the_gradient() -> None:
    def rows(**changes: int | None) -> dict[str, str]:
        return dict(figures(make_report(summary=make_summary(**changes))))

    silent = rows(groups_trained=16, groups_trained_zero_variance=16, episodes_left_out=95)
    assert silent["groups trained"] == "16, [bold red]16 of them without variance[/]"
    assert silent["left out of the loss"] == "95 episodes, cut off for their length"
    assert rows(groups_trained_zero_variance=None, episodes_left_out=None)["groups trained"] == "640"


def test_report_names_why_the_next_step_is_not_trained() -> None:
    trouble = StepTrouble(version_in=4, error="ValueError: [no]", failures=3)
    shown = dict(figures(make_report(summary=make_summary(step_trouble=trouble))))
    assert shown["training"] == r"[bold red]training step from version 4 failed 3 times: ValueError: \[no][/]"
    assert "training" not in dict(figures(make_report(summary=make_summary())))


def test_figures_of_a_run_that_trained_nothing() -> None:
    nothing = make_summary(
        versions=(), mean_reward_by_version=(None,) * 40, lag_max=None, lag_mean=None, logprob_gap_max=None, outcomes={}
    )
    rows = dict(figures(make_report(summary=nothing, session=None)))
    assert rows["policy versions"] == "0 of 40"
    assert rows["mean reward"] == "-"
    assert rows["staleness"] == "nothing trained, bound 1"
    assert rows["episodes ended by"] == "none"


def test_present_prints_curve_figures_queries_and_ways_on_and_writes_the_files(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=100)
    present(make_report(), console=console, data_dir=tmp_path, json_file=tmp_path / "report.json")
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "demo-shell-seed7 is finished" in text
    assert re.search(r"^ 1\.00 ┤", text, re.MULTILINE)
    for example in EXAMPLES:
        assert example.title in text
        assert example.for_run("demo-shell-seed7") in text
    for place in (tmp_path / "report.json", tmp_path / "logs", tmp_path / "weights" / "demo-shell-seed7"):
        assert str(place) in text
    assert "flower" in text
    assert "postgresql://" not in text
    assert json.loads((tmp_path / "report.json").read_text())["run"] == "demo-shell-seed7"
    assert imread(tmp_path / "reports" / "demo-shell-seed7.png").std() > 0.05


def test_a_long_way_on_has_a_line_of_its_own_that_is_not_broken(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=80)
    data_dir = tmp_path / ("x" * 60)
    present(make_report(), console=console, data_dir=data_dir, json_file=None)
    assert isinstance(console.file, StringIO)
    assert f"logs of each process      \n  {data_dir}/logs\n" in console.file.getvalue()
    psql = own_command(data_dir)("psql")
    assert f"\n  {psql}\n" in console.file.getvalue()


def test_commands_to_copy_name_the_data_folder_unless_it_is_the_usual_one() -> None:
    assert own_command(Path(".rollmill").absolute())("psql").endswith(" psql")
    assert own_command(Path("/some where"))("psql").endswith(" psql --data-dir '/some where'")


def test_long_answers_show_their_beginning_and_end() -> None:
    answer = Answer(columns=("n", "square"), rows=tuple((n, n * n) for n in range(40)))
    lines = printed(answer_table(answer, max_rows=4))
    assert [line.split() for line in lines] == [
        ["n", "square"],
        ["0", "0"],
        ["1", "1"],
        ["…", "36", "more"],
        ["38", "1444"],
        ["39", "1521"],
    ]
    assert len(printed(answer_table(answer, max_rows=None))) == 41


def test_an_empty_answer_says_so() -> None:
    assert [line.strip() for line in printed(answer_table(Answer(columns=("n",), rows=()), max_rows=8))] == [
        "n",
        "no rows",
    ]


def test_values_from_the_database_are_never_taken_for_markup() -> None:
    answer = Answer(columns=("said",), rows=(("[bold]calc[/]",),))
    assert printed(answer_table(answer, max_rows=8))[1] == "[bold]calc[/]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (7, "7"),
        (0.123456, "0.1235"),
        (Decimal("0.500"), "0.500"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([-0.25, -1.23456, -3.0, -4.0, -5.0], "[-0.25, -1.235, -3, … 5]"),
        ({"a": 1}, '{"a": 1}'),
        ("two\nlines", "two lines"),
        ("x" * 60, "x" * 43 + "…"),
    ],
)
def test_cells_are_short(value: object, shown: str) -> None:
    assert short_cell(value) == shown


def test_pipes_get_tab_separated_values_in_full_precision() -> None:
    answer = Answer(columns=("name", "mean"), rows=(("a", 0.123456789), ("b", None)))
    assert tab_separated(answer) == "name\tmean\na\t0.123456789\nb\t\n"
