from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from common.config import EvalConfig, RunConfig
from common.db.evaluations import Evaluation
from common.errors import SetupError
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from deploy.curve import held_out_points
from deploy.display import plain_line, render
from deploy.evaluate import Asked, eval_config, result_table, whole_model
from deploy.local import StackAddresses, StackPlan, work_specs
from deploy.progress import evaluated, last_evaluation
from deploy.run_checks import with_model
from deploy.summary import figures
from tests.unit.deploy.samples import make_report, make_snapshot, make_summary, make_view

NOTHING = Asked(model=None, dataset=None, episodes=None, samples_per_task=None)
CONFIG = RunConfig(name="mine", model=Path("/model"), eval=EvalConfig(num_tasks=20, samples_per_task=4))


def make_evaluation(**changes: object) -> Evaluation:
    given: dict[str, object] = {
        "version": 10,
        "finished": True,
        "tasks": 20,
        "episodes": 80,
        "scored": 80,
        "mean_reward": 0.5,
        "standard_error": 0.021,
        "pass_at": (0.5, 0.6, 0.7, 0.75),
        "failed": 0,
        "mixed": 0,
        "cancelled": 0,
        "error": None,
    }
    return Evaluation(**{**given, **changes})  # type: ignore[arg-type]


def said(renderable: object) -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_run_that_evaluates_trains_nothing_and_has_the_models_name_apart(tmp_path: Path) -> None:
    config = eval_config(CONFIG, NOTHING)
    assert (config.name, config.train.num_versions, config.dataset, config.model) == (
        "mine-eval",
        0,
        None,
        Path("/model"),
    )
    assert config.eval is not None
    assert (config.eval.num_tasks, config.eval.samples_per_task) == (20, 4)
    assert RunConfig.model_validate(config.model_dump()) == config


def test_episodes_are_rounded_up_to_whole_tasks() -> None:
    wanted = eval_config(CONFIG, Asked(model=None, dataset=None, episodes=9, samples_per_task=None)).eval
    assert wanted is not None
    assert (wanted.num_tasks, wanted.samples_per_task) == (3, 4)


def test_a_data_set_that_is_asked_for_is_played_whole(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"q": {number}}}\n' for number in range(70)))
    wanted = eval_config(CONFIG, Asked(model=None, dataset=file, episodes=None, samples_per_task=None)).eval
    assert wanted is not None
    assert (wanted.dataset, wanted.num_tasks) == (file, 70)


def test_the_run_of_a_data_set_can_be_read_from_a_file_though_tasks_were_to_be_made(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("{}\n")
    made = CONFIG.model_copy(update={"num_tasks": 7, "eval": EvalConfig(seed=7)})
    config = eval_config(made, Asked(model=None, dataset=file, episodes=None, samples_per_task=None))
    assert RunConfig.model_validate(config.model_dump()) == config


def test_without_a_trainer_the_stack_has_the_other_processes() -> None:
    plan = StackPlan(model_dir=Path("/m"), trainer_config=None)
    addresses = StackAddresses(
        database_url="d", broker_url="b", broker_api_url=None, engine_url="http://127.0.0.1:20004"
    )
    names = [spec.name for spec in work_specs(addresses, plan=plan, data_dir=Path("/d"))]
    assert names == ["engine", "fleet-init", "fleet-run", "fleet-eval", "feeder", "reaper"]


def test_a_mean_of_zero_is_shown_and_a_missing_one_is_not_zero() -> None:
    nothing = make_evaluation(version=20, mean_reward=None, standard_error=None, pass_at=(), scored=0, failed=80)
    zero = make_evaluation(mean_reward=0.0, standard_error=0.0)
    assert (evaluated(zero), evaluated(nothing)) == ("0.00 ± 0.00", "-")
    assert last_evaluation((zero, nothing)) == zero
    assert held_out_points((zero, nothing)) == [(10, 0.0, 0.0)]


@pytest.mark.parametrize(("lost", "shown"), [({}, "none"), ({"failed": 2, "scored": 78}, "2 failed")])
def test_the_table_names_what_is_not_in_the_figures(lost: dict[str, int], shown: str) -> None:
    lines = dict(
        line.split(maxsplit=1)
        for line in said(result_table(CONFIG, make_evaluation(**lost), model=CONFIG.model, took_s=3)).splitlines()
    )
    assert lines["pass@4"].strip() == "0.750"
    assert lines["not"].split(maxsplit=1)[1].strip() == shown


def test_the_report_names_the_first_and_the_last_evaluation_and_failures_apart() -> None:
    points = (make_evaluation(version=0, mean_reward=0.25), make_evaluation(failed=3, scored=77))
    report = make_report(summary=make_summary(evaluations=points))
    assert dict(figures(report))["held-out tasks"] == (
        "2 evaluations: 0.25 ± 0.02 at version 0, 0.50 ± 0.02 at version 10, 3 episodes failed, not counted"
    )


def test_the_live_display_shows_the_last_evaluation_and_the_one_under_way() -> None:
    points = (make_evaluation(), make_evaluation(version=20, finished=False, episodes=32, scored=9, mean_reward=0.9))
    view = make_view(snapshot=make_snapshot(evaluations=points))
    (line,) = [line for line in said(render(view)).splitlines() if "held-out" in line]
    assert "0.50 ± 0.02 at version 10" in line
    assert "version 20: 9 of 32 episodes" in line
    assert "held out 0.50 ± 0.02" in plain_line(view)


def make_adapter(folder: Path, *, base: Path | None) -> Path:
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": base and str(base)}))
    (folder / ADAPTER_WEIGHTS).write_bytes(b"")
    return folder


def test_an_adapter_that_names_other_start_weights_than_the_run_is_refused_with_both(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base=tmp_path)
    with pytest.raises(SetupError, match=f"{adapter} was trained over {tmp_path}, and the run's model is /model: "):
        whole_model(CONFIG, replace(NOTHING, model=adapter), data_dir=tmp_path)
    other = make_adapter(tmp_path / "other", base=None)
    on_adapter = CONFIG.model_copy(update={"model": adapter})
    with pytest.raises(SetupError, match=f"model = {adapter} is an adapter too"):
        whole_model(on_adapter, replace(NOTHING, model=other), data_dir=tmp_path)
    assert whole_model(CONFIG, replace(NOTHING, model=tmp_path), data_dir=tmp_path).model == tmp_path


def test_a_run_file_whose_model_is_an_adapter_is_told_what_to_do(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", base=Path("/start"))
    with pytest.raises(SetupError, match=f"run mine: model = {adapter} is a LoRA adapter, .* start weights, /start; "):
        with_model(CONFIG.model_copy(update={"model": adapter}))
