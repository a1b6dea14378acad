"""`rollmill engine add|list|drain|remove` beside a real database and the small engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.config import TINY_MODELS, RolloutConfig, RunConfig
from common.config_train import TrainConfig
from common.db import engines, runs
from common.db.session import Database
from common.episode import EngineState, RunState
from common.errors import SetupError
from common.weights import LOADING, version_name
from deploy.engine import EngineKind, engine_spec
from deploy.engine_ask import ask
from deploy.engine_serve import check_context_fits, check_model_fits
from deploy.ports import free_port
from deploy.process import Process

Answer = tuple[int, str]
MODEL = TINY_MODELS / "tiny-calculator"
START_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a small engine."""
    port = free_port()
    spec = engine_spec(EngineKind.SMALL, model=MODEL, port=port, env={"OMP_NUM_THREADS": "1"})
    process = Process(spec, log_file=tmp_path_factory.mktemp("engine") / "log", mark="ENGINE_TEST=1")
    deadline = time.monotonic() + START_TIMEOUT_S
    assert spec.ready is not None
    while not spec.ready():
        assert process.exit_code() is None, process.log_tail()
        assert time.monotonic() < deadline, process.log_tail()
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill_group()
    while process.exit_code() is None:
        assert time.monotonic() < deadline + START_TIMEOUT_S
        time.sleep(0.05)


@pytest.fixture
def rollmill(database_url: str) -> Callable[..., Answer]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMILL_")}

    def call(*arguments: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "engine", *arguments],
            env={**environment, "ROLLMILL_DATABASE_URL": database_url, "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return call


def open_run(database: Database, model: Path) -> runs.Run:
    with database.begin() as conn:
        return runs.open_run(conn, RunConfig(name="run-a", model=model))


def states(database: Database) -> dict[str, EngineState]:
    with database.begin() as conn:
        return {one.url: one.state for one in engines.status(conn)}


def test_an_engine_comes_is_drained_comes_back_and_goes(
    database: Database, rollmill: Callable[..., Answer], engine: str
) -> None:
    open_run(database, MODEL)
    code, said = rollmill("list")
    assert (code, said.splitlines()[1].strip()) == (0, "no engines")
    added = f"engine {engine} serves run run-a: its keeper loads the newest version within seconds\n"
    assert rollmill("add", f"{engine}/", "--run", "run-a") == (0, added)
    assert states(database) == {engine: EngineState.SERVING}
    code, said = rollmill("list")
    assert (code, said.splitlines()[1].split()) == (0, [engine, "run-a", "serving", "-", "-", "never", "0", "0", "0"])
    assert rollmill("drain", engine) == (0, f"engine {engine} gets no new work; none runs\n")
    assert states(database) == {engine: EngineState.DRAINING}
    assert rollmill("add", engine, "--run", "run-a") == (0, added)
    assert states(database) == {engine: EngineState.SERVING}
    assert rollmill("remove", engine) == (0, f"engine {engine} is forgotten\n")
    assert states(database) == {}


def test_what_is_wrong_is_one_line_and_nothing_is_stored(
    database: Database, rollmill: Callable[..., Answer], engine: str, tmp_path: Path
) -> None:
    larger = shutil.copytree(MODEL, tmp_path / "larger")
    config = (larger / "config.json").read_text()
    (larger / "config.json").write_text(config.replace('"vocab_size": 576', '"vocab_size": 600'))
    open_run(database, larger)
    nobody = f"http://127.0.0.1:{free_port()}"
    unknown = "rollmill: no run nope in the database; there are: run-a\n"
    assert rollmill("add", engine, "--run", "nope") == (2, unknown)
    for arguments, words in (
        (("add", engine, "--run", "run-a"), f"engine {engine} does not know token id 599, the run's model does"),
        (("add", engine, "--run", "run-a", "--model-name", "q"), f"engine {engine} serves policy, not q:"),
        (("add", nobody, "--run", "run-a"), f"no engine answers at {nobody}/weight_info"),
        (("add", "localhost", "--run", "run-a"), "localhost is no engine's address: give http://HOST:PORT"),
        (("drain", engine), f"no engine {engine} in the database"),
        (("remove", engine), f"no engine {engine} in the database"),
        (("serve", str(tmp_path), "--run", "run-a"), f"model folder {tmp_path} holds no model"),
        (("serve", str(MODEL), "--run", "run-a", "--python", "/no/python"), "no interpreter /no/python"),
    ):
        code, said = rollmill(*arguments)
        assert code == 2
        assert said.startswith(f"rollmill: {words}")
        assert said.count("\n") == 1
    assert states(database) == {}


def test_a_context_that_is_too_short_is_refused(
    database: Database, rollmill: Callable[..., Answer], engine: str
) -> None:
    with database.begin() as conn:
        config = RunConfig(name="run-a", model=MODEL, rollout=RolloutConfig(max_row_tokens=513))
        run = runs.open_run(conn, config)
    words = "has a context of 512 ids and the run needs 513, its rollout.max_row_tokens: it would cut episodes."
    advice = "Start it with --max-model-len 513, or set rollout.max_row_tokens to 512 or less in a new run"
    assert rollmill("add", engine, "--run", "run-a") == (2, f"rollmill: engine {engine} {words} {advice}\n")
    assert states(database) == {}
    with pytest.raises(SetupError, match=r"tiny-calculator that is started so has a context of 512 ids"):
        check_context_fits(MODEL, run, max_model_len=None)
    with pytest.raises(SetupError, match=r"so has a context of 60 ids .* Start it with --max-model-len 513"):
        check_context_fits(MODEL, run, max_model_len=60)
    check_context_fits(MODEL, run, max_model_len=513)


def test_a_server_is_added_once_whatever_it_is_called(
    database: Database, rollmill: Callable[..., Answer], engine: str
) -> None:
    first = open_run(database, MODEL)
    alias = engine.replace("127.0.0.1", "LocalHost")
    with database.begin() as conn:
        runs.open_run(conn, RunConfig(name="run-b", model=MODEL))
        engines.register(conn, engine, run_id=first.id)
    code, said = rollmill("add", alias, "--run", "run-b")
    assert (code, said.partition(":")[0], said.count("\n")) == (2, "rollmill", 1)
    assert f"engine {alias.lower()} is already here as {engine}: give that address" in said
    assert states(database) == {engine: EngineState.SERVING}
    assert rollmill("drain", f"{alias}/") == (0, f"engine {engine} gets no new work; none runs\n")
    assert rollmill("remove", alias) == (0, f"engine {engine} is forgotten\n")


def test_a_run_of_adapters_is_served_over_its_own_start_weights_alone(database: Database, tmp_path: Path) -> None:
    """Whole models are loaded over whatever an engine started with; adapters are not."""
    copied, other = shutil.copytree(MODEL, tmp_path / "copied"), shutil.copytree(MODEL, tmp_path / "other")
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    whole = open_run(database, MODEL)
    with database.begin() as conn:
        adapter = runs.open_run(conn, RunConfig(name="run-b", model=MODEL, train=TrainConfig(lora_rank=8)))
    for folder in (MODEL, copied):
        check_model_fits(folder, adapter)
    check_model_fits(other, whole)
    with pytest.raises(SetupError, match=r"other has other weights than .*, over which run run-b trains an adapter"):
        check_model_fits(other, adapter)


def test_a_small_engine_is_given_to_a_run_of_adapters(
    database: Database, rollmill: Callable[..., Answer], engine: str
) -> None:
    with database.begin() as conn:
        runs.open_run(conn, RunConfig(name="run-b", model=MODEL, train=TrainConfig(lora_rank=8)))
    code, said = rollmill("add", engine, "--run", "run-b")
    assert (code, states(database)) == (0, {engine: EngineState.SERVING}), said


@pytest.fixture
def named(engine: str) -> Iterator[Callable[[str], None]]:
    """Give the engine's weights a name; the end of the test gives them the old one."""

    def name(version: str) -> None:
        assert ask(engine, "/update_weight_version", {"new_version": version})[0] == 200

    _, before = ask(engine, "/weight_info")
    yield name
    name(before["weight_version"])


def test_an_engine_of_another_run_is_taken_by_force_alone(
    database: Database, rollmill: Callable[..., Answer], engine: str, named: Callable[[str], None]
) -> None:
    open_run(database, MODEL)
    advice = f"remove it there first (`rollmill engine remove {engine}`), or take it with --force"
    named(version_name("elsewhere", 7))
    refused = (
        f"rollmill: engine {engine} serves elsewhere/000007, of another run than run-a: {advice}, which is right once "
        "that run uses it no more\n"
    )
    assert rollmill("add", engine, "--run", "run-a") == (2, refused)
    named(LOADING)
    refused = f"rollmill: engine {engine} is loading weights for some run: {advice}\n"
    assert rollmill("add", engine, "--run", "run-a") == (2, refused)
    assert states(database) == {}
    named(version_name("run-a", 7))
    assert rollmill("add", engine, "--run", "run-a")[0] == 0
    named(version_name("elsewhere", 7))
    code, said = rollmill("add", engine, "--run", "run-a", "--force")
    assert (code, said.partition(":")[0]) == (0, f"engine {engine.partition(':')[0]}")


def test_an_engine_goes_from_run_to_run_of_one_database_once_the_first_is_over(
    database: Database, rollmill: Callable[..., Answer], engine: str
) -> None:
    first = open_run(database, MODEL)
    with database.begin() as conn:
        second = runs.open_run(conn, RunConfig(name="run-b", model=MODEL))
        engines.register(conn, engine, run_id=first.id)
        runs.move(conn, first.id, RunState.PAUSED)
    refused = (
        f"rollmill: engine {engine} serves run run-a of this database, which is not over: remove it there first "
        f"(`rollmill engine remove {engine}`), or take it with --force\n"
    )
    assert rollmill("add", engine, "--run", "run-b") == (2, refused)
    with database.begin() as conn:
        assert engines.holder(conn, engine) == "run-a"
        runs.move(conn, first.id, RunState.STOPPED)
    assert rollmill("add", engine, "--run", "run-b")[0] == 0
    with database.begin() as conn:
        assert engines.holder(conn, engine) == second.name


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[str], tuple[int, str] | None]], str]]:
    """Start a server: path to status and body, None = never answer; gives its URL."""
    servers: list[ThreadingHTTPServer] = []
    over = threading.Event()

    def start(answer: Callable[[str], tuple[int, str] | None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = answer(self.path)
                if said is None:
                    over.wait(60)
                    return
                self.send_response(said[0])
                self.end_headers()
                self.wfile.write(said[1].encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def half_an_engine(path: str) -> tuple[int, str] | None:
    """Everything but ids and log-probs."""
    known: dict[str, object] = {
        "/health": {},
        "/weight_info": {"weight_version": "default"},
        "/is_paused": {"is_paused": False},
        "/v1/models": {"data": [{"id": "policy"}]},
        "/v1/completions": {"choices": [{"text": "7", "finish_reason": "length"}]},
    }
    return (200, json.dumps(known[path])) if path in known else (404, "Not Found")


def test_what_is_no_engine_is_one_line_and_nothing_is_stored(
    database: Database,
    rollmill: Callable[..., Answer],
    answering: Callable[[Callable[[str], tuple[int, str] | None]], str],
) -> None:
    open_run(database, MODEL)
    web = answering(lambda path: (200, "<html>\n welcome") if path == "/" else (404, "<html>\n no such page"))
    hanging = answering(lambda path: None)
    half = answering(half_an_engine)
    for url, words in (
        (web, f"{web} answers, but is no engine"),
        (hanging, f"no engine answers at {hanging}/weight_info: timed out"),
        (half, f"engine {half} /v1/completions answers 200 without id and log-prob"),
    ):
        code, said = rollmill("add", url, "--run", "run-a")
        assert code == 2
        assert said.startswith(f"rollmill: {words}")
        assert said.count("\n") == 1
    assert states(database) == {}
