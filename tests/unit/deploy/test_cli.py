"""The command line as a person meets it: exit codes and words."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import TINY_MODELS, RunConfig
from common.errors import SetupError
from common.settings import masked
from deploy.cli import app
from deploy.demo import DemoHandler, demo_config
from deploy.folder import DataFolder, write_private
from deploy.handlers import check_handler
from deploy.local import StackAddresses, addresses_file

HEAVY = ("matplotlib", "pyarrow", "sqlalchemy", "alembic", "torch")
RUNNER = CliRunner(env={name: None for name in os.environ if name.startswith("ROLLMILL_")} | {"COLUMNS": "100"})


def refusal(*arguments: str) -> str:
    """What a command says that refuses to start."""
    error = RUNNER.invoke(app, arguments).exception
    assert isinstance(error, SetupError), error
    return str(error)


def test_help_names_every_command() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in (
        "demo",
        "up",
        "status",
        "report",
        "sql",
        "psql",
        "sft",
        "flower",
        "migrate",
        "export",
        "prune",
        "queries",
        "db",
        "broker",
        "sandbox",
        "run",
        "cancel",
        "engine",
    ):
        assert f"│ {command} " in result.output


def test_help_comes_without_loading_anything_heavy() -> None:
    script = f"import sys, deploy.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"


def test_what_has_to_be_mended_is_one_line_on_stderr_and_exit_code_2() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "demo"],
        env={**environment, "ROLLMILL_DATABSE_URL": "postgresql://x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rollmill: unknown variable ROLLMILL_DATABSE_URL: did you mean ROLLMILL_DATABASE_URL?\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("demo", "--handler", "chess"), "chess"),
        (("demo", "--versions", "0"), "--versions"),
        (("demo", "--max-staleness", "-1"), "--max-staleness"),
        (("demo", "--broker", "kafka"), "kafka"),
        (("flower", "--port", "99999"), "--port"),
        (("dmeo",), "dmeo"),
        (("cancel", "--episode", "0"), "--episode"),
        (("cancel", "--episode", "9" * 30), "--episode"),
        (("run", "halt", "mine"), "halt"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_missing_run_configuration_is_refused(tmp_path: Path) -> None:
    line = refusal("up", "--config", str(tmp_path / "no.toml"))
    assert line == f"run configuration {tmp_path / 'no.toml'} cannot be read: No such file or directory"


def write_config(path: Path, **fields: object) -> str:
    path.write_text("".join(f"{name} = {str(value)!r}\n" for name, value in fields.items()))
    return str(path)


def test_missing_model_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.toml", name="mine", model=tmp_path / "nothing")
    assert refusal("up", "--config", config) == (
        f"model folder {tmp_path / 'nothing'} of run mine holds no model: there is no config.json in it"
    )


def test_unknown_handler_is_refused_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = write_config(tmp_path / "run.toml", name="mine", model=tmp_path / "model", handler="chess")
    assert refusal("up", "--config", config) == (
        "run mine: unknown handler 'chess': known are calculator, shell; an own one is given as package.module:Class"
    )


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        ("nasty:Nasty", "handler 'nasty:Nasty': no module 'nasty'"),
        ("own_tasks:Nasty", "handler 'own_tasks:Nasty': module 'own_tasks' has no class 'Nasty'"),
        ("own_tasks:Empty", "handler 'own_tasks:Empty' lacks tasks, init, call_tool, eval"),
        ("broken_tasks:Any", "RuntimeError: no such licence"),
        (":Any", "Empty module name"),
    ],
)
def test_a_handler_that_cannot_be_loaded_is_refused_before_anything_starts(
    handler: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own_tasks.py").write_text("class Empty:\n    pass\n")
    (tmp_path / "code" / "broken_tasks.py").write_text("raise RuntimeError('no such licence')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    config = write_config(tmp_path / "run.toml", name="mine", model=tmp_path / "model", handler=handler)
    assert refusal("up", "--config", config, "--data-dir", str(tmp_path / "data")) == (
        f"run mine: the handler cannot be loaded: {why}. Its module must be installed, "
        f"or lie in {Path.cwd()} or in a folder that you set PYTHONPATH to"
    )
    assert not (tmp_path / "data").exists()


def test_a_model_whose_prompts_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = shutil.copytree(TINY_MODELS / "tiny-calculator", tmp_path / "model")
    config = write_config(tmp_path / "run.toml", name="mine", model=model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template + "{{ messages | length }}")
    said = refusal("up", "--config", config, "--data-dir", str(tmp_path / "data"))
    assert said.startswith(f"run mine: {model} (")
    assert "chat template cannot be extended turn by turn" in said
    assert "\n" not in said
    (model / "chat_template.jinja").write_text(template)
    rows = (model / "config.json").read_text().replace('"vocab_size": 576', '"vocab_size": 100')
    (model / "config.json").write_text(rows)
    said = refusal("up", "--config", config, "--data-dir", str(tmp_path / "data"))
    assert said.startswith(f"run mine: {model}: the tokenizer has ids up to")
    assert said.endswith("the model's embeddings 100 rows")
    assert not (tmp_path / "data").exists()


def test_an_own_handler_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = "".join(f"    def {name}(self): ...\n" for name in ("tasks", "init", "call_tool", "eval"))
    (tmp_path / "own_tasks.py").write_text(f"class Own:\n{methods}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_handler(RunConfig(name="mine", model=tmp_path, handler="own_tasks:Own"))


def test_ctrl_c_while_the_command_line_loads_ends_it_without_a_word() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "deploy", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # It tells of each module that it has loaded; typer is the first of the heavy ones.
        while not process.stderr.readline().rstrip().endswith(" typer"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGINT, "")
    assert [line for line in told.splitlines() if not line.startswith("import time:")] == []


def test_an_argument_that_is_no_text_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "sql", b"SELECT '\xff'"], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"rollmill: argument \"SELECT '\\udcff'\" is not UTF-8\n"


def test_report_file_in_a_wrong_place_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refusal("demo", "--report", str(tmp_path / "file" / "report.json"), "--data-dir", str(tmp_path / "data"))
    assert line.startswith(f"report file {tmp_path / 'file' / 'report.json'} cannot be written:")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("arguments", [(), ("--episode", "1", "--run", "mine")])
def test_cancel_needs_exactly_one_kind_of_thing(arguments: tuple[str, ...]) -> None:
    assert refusal("cancel", *arguments) == "say what to cancel by one of --episode ID, --group ID and --run NAME"


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("report",),
        ("sql", "SELECT 1"),
        ("psql",),
        ("sft", "--run", "mine", "--model", "m", "--min-reward", "1", "--out", "new"),
        ("run", "list"),
        ("run", "stop", "mine"),
        ("cancel", "--run", "mine"),
    ],
)
def test_without_a_database_the_person_is_told_how_to_get_one(command: tuple[str, ...], tmp_path: Path) -> None:
    assert refusal(*command, "--data-dir", str(tmp_path)) == (
        f"no database in data folder {tmp_path}: make one with `rollmill demo`, "
        "name another folder with --data-dir, or set ROLLMILL_DATABASE_URL"
    )


def test_flower_without_a_stack_says_so(tmp_path: Path) -> None:
    line = refusal("flower", "--data-dir", str(tmp_path))
    assert line == f"no stack runs on data folder {tmp_path}: start one with `rollmill up`"


def test_flower_beside_a_broker_that_is_down_says_so(tmp_path: Path) -> None:
    result = RUNNER.invoke(
        app, ["flower", "--data-dir", str(tmp_path)], env={"ROLLMILL_BROKER_URL": "redis://:secret@127.0.0.1:1/0"}
    )
    assert isinstance(result.exception, SetupError)
    assert str(result.exception).startswith("cannot use the broker redis://:***@127.0.0.1:1/0: ")


@pytest.mark.parametrize("url", ["kafka://host:9092", "garbage", "amqp://me:secret@host:port//"])
def test_a_broker_of_an_unknown_kind_is_refused_with_the_forms_that_are_known(url: str, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["flower", "--data-dir", str(tmp_path)], env={"ROLLMILL_BROKER_URL": url})
    assert isinstance(result.exception, SetupError)
    line = str(result.exception)
    assert line.startswith(f"broker URL {masked(url)!r} is malformed (")
    assert line.endswith("give amqp://user:password@host:port// or redis://:password@host:port/0")


@pytest.mark.parametrize("command", [("demo",), ("status",), ("sql", "SELECT 1"), ("flower",)])
def test_a_data_folder_that_is_a_file_is_called_that(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refusal(*command, "--data-dir", str(tmp_path / "file"))
    assert line.startswith(f"data folder {tmp_path / 'file'} is not a folder: ")


def test_while_a_stack_starts_questions_are_to_be_asked_again(tmp_path: Path) -> None:
    with DataFolder(tmp_path):
        line = refusal("sql", "SELECT 1", "--data-dir", str(tmp_path))
    assert re.fullmatch(
        rf"process {os.getpid()} \(.+\) holds data folder {tmp_path} and has no stack up: "
        "try again when it is up or has ended",
        line,
    )


def test_a_second_flower_is_told_of_the_first(tmp_path: Path) -> None:
    addresses = StackAddresses(database_url="", broker_url="redis://", broker_api_url=None, engine_url="")
    with DataFolder(tmp_path / "flower"):
        (tmp_path / "run").mkdir()
        write_private(addresses_file(tmp_path), addresses.to_json())
        line = refusal("flower", "--data-dir", str(tmp_path))
    assert re.fullmatch(rf"Flower already runs on data folder {tmp_path}, as process {os.getpid()} \(.+\)", line)


def test_migrate_needs_a_database() -> None:
    assert "ROLLMILL_DATABASE_URL is not set" in refusal("migrate")


@pytest.mark.parametrize("handler", list(DemoHandler))
def test_every_demo_has_its_start_model(handler: DemoHandler) -> None:
    config = demo_config(handler=handler, seed=3, num_versions=5, max_staleness=0)
    assert config.name == f"demo-{handler}-seed3"
    assert config.model == TINY_MODELS / f"tiny-{handler}"
    assert (config.model / "config.json").exists()
    assert (config.train.num_versions, config.train.max_staleness, config.seed) == (5, 0, 3)


def test_dry_run_checks_all_of_it_says_what_it_would_do_and_starts_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.toml", name="mine", model=TINY_MODELS / "tiny-shell", handler="shell")
    data_dir = tmp_path / "data"
    result = CliRunner().invoke(app, ["up", "--dry-run", "--config", config, "--data-dir", str(data_dir)])
    assert result.exit_code == 0, result.output
    assert "engines       one, started here: the small CPU engine\n" in result.output
    assert f"weights       {data_dir}/weights/mine/, a version a step" in result.output
    assert "start         checked: Qwen3ForCausalLM computes with attention sdpa\n" in result.output
    assert not data_dir.exists()

    (tmp_path / "run.toml").write_text((tmp_path / "run.toml").read_text() + "[rollout]\nmax_row_tokens = 600\n")
    assert refusal("up", "--dry-run", "--config", config).startswith(
        "rollout.max_row_tokens = 600 is more than the 512"
    )
