"""`rollmill engine serve`: one vLLM server for a run, from its start to its drained end."""

from __future__ import annotations

import filecmp
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from common.context import needed_context
from common.db import engines
from common.db.runs import Run
from common.db.session import Database
from common.errors import DatabaseUnavailable, SetupError
from common.model_folder import read_context
from deploy.crash_policy import CrashPolicy
from deploy.engine_probe import check_engine, num_requests, read_vocab_size
from deploy.folder import DataFolder
from deploy.ports import HOST, require_free
from deploy.supervisor import State, StopRequested, Supervisor
from deploy.vllm import VllmPlan, vllm_spec

POLL_S = 0.1
LOOK_EVERY_S = 2.0
"""How often the database is asked whether the engine is still wanted."""
NOTICED_S = 1.0
"""After it, every worker has read that the engine takes no new work."""
CRASHES = CrashPolicy(backoff_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Service:
    """What to serve, for whom."""

    plan: VllmPlan
    run: Run
    data_dir: Path
    drain_s: float
    """How long running requests may take at the end."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.plan.port}"


def check_model_fits(model: Path, run: Run) -> None:
    """Raise SetupError unless a model has the run's vocabulary and tokenizer, and for a run of adapters its weights."""
    theirs, ours = read_vocab_size(model), read_vocab_size(run.config.model)
    if theirs != ours:
        raise SetupError(f"model {model} has a vocabulary of {theirs}, that of run {run.name} has {ours}")
    files = [folder / "tokenizer.json" for folder in (model, run.config.model)]
    for file in files:
        if not file.is_file():
            raise SetupError(f"model folder {file.parent} has no {file.name}")
    if files[0].read_bytes() != files[1].read_bytes():
        raise SetupError(f"{files[0]} is another tokenizer than {files[1]} of run {run.name}")
    if run.config.train.lora_rank is not None and not _same_weights(model, run.config.model):
        raise SetupError(
            f"{model} has other weights than {run.config.model}, over which run {run.name} trains an adapter: "
            "serve those"
        )


def check_context_fits(model: Path, run: Run, *, max_model_len: int | None) -> None:
    """Raise SetupError where a server of the model, told `max_model_len`, would have a shorter context than it must."""
    needed = needed_context(run.config.model, run.config.rollout.max_row_tokens)
    if needed is not None and (lack := needed.lack(max_model_len or read_context(model))):
        raise SetupError(f"an engine of {model} that is started so {lack}")


def _same_weights(model: Path, other: Path) -> bool:
    """Byte by byte, which takes seconds a gigabyte, unless it is the same folder."""
    if model.resolve() == other.resolve():
        return True
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (model, other)]
    same = names[0] == names[1] and all(filecmp.cmp(model / name, other / name, shallow=False) for name in names[0])
    return same and bool(names[0])


def serve_engine(service: Service, database: Database, *, console: Console) -> None:
    """Serve until somebody asks us to stop or removes the engine, then drain.

    Raises SetupError when vLLM does not come up or stay up.
    """
    require_free(service.plan.port, what="the engine")
    with (
        DataFolder(service.data_dir / "engines" / str(service.plan.port)) as folder,
        Supervisor(folder, crash_policy=CRASHES) as supervisor,
    ):
        log_file = folder.log_file("engine")
        try:
            supervisor.launch(vllm_spec(service.plan))
            _say(console, f"starting vLLM on {service.url} with {service.plan.model}; its log: {log_file}")
            with console.status("") as status:
                supervisor.wait_ready(lambda waited_s: status.update(_progress(service, log_file, waited_s)))
            check_engine(
                service.url,
                model=service.run.config.model,
                served_name=service.plan.served_name,
                temperature=service.run.config.rollout.temperature,
                top_p=service.run.config.rollout.top_p,
                max_row_tokens=service.run.config.rollout.max_row_tokens,
                lora=service.plan.lora is not None,
            )
            with database.begin() as conn:
                engines.register(conn, service.url, run_id=service.run.id)
            _say(console, f"engine {service.url} serves run {service.run.name}; Ctrl-C drains it")
            _keep_until_removed(service, database, supervisor, console=console)
            _say(console, f"engine {service.url} was removed from its run, so it ends")
            _drain(service, console=console, to_end_now="Ctrl-C twice")
        except StopRequested:
            if _quietly(lambda: _mark_draining(database, service.url)):
                _drain(service, console=console, to_end_now="Ctrl-C again")
        finally:
            _quietly(lambda: _forget(database, service.url))
    _say(console, f"engine {service.url} has ended")


def _keep_until_removed(service: Service, database: Database, supervisor: Supervisor, *, console: Console) -> None:
    """Keep vLLM alive while the database knows the engine, or is away. Raises as Supervisor.poll."""
    num_restarts, look_at = 0, time.monotonic() + LOOK_EVERY_S
    while True:
        supervisor.poll()
        (engine,) = supervisor.statuses()
        if engine.state is State.UP and engine.restarts > num_restarts:
            num_restarts = engine.restarts
            _say(console, f"engine {service.url} is up again: vLLM {engine.last_exit}")
        if time.monotonic() >= look_at:
            if _quietly(lambda: _is_removed(database, service.url)):
                return
            look_at = time.monotonic() + LOOK_EVERY_S
        time.sleep(POLL_S)


def _progress(service: Service, log_file: Path, waited_s: float) -> str:
    lines = log_file.read_text(errors="replace").splitlines()[-1:]
    last = lines[0].rpartition("] ")[2][:80].replace("[", "(") if lines else ""
    return f"vLLM loads {service.plan.model.name}, {waited_s:.0f} s: {last}"


def _drain(service: Service, *, console: Console, to_end_now: str) -> None:
    """Wait for what runs, `drain_s` at most; nothing new comes. A second signal ends vLLM, and with it the wait."""
    _say(console, f"draining engine {service.url}: waiting {service.drain_s:g} s at most; {to_end_now} ends it now")
    left = wait_until_idle(service.url, timeout_s=service.drain_s)
    if left:
        _say(console, f"engine {service.url} ends with {left} requests unfinished")


def wait_until_idle(url: str, *, timeout_s: float) -> int:
    """Wait until an engine that gets no new work has no request left; how many it has at the deadline, else 0."""
    deadline = time.monotonic() + timeout_s
    quiet_until = time.monotonic() + min(NOTICED_S, timeout_s)
    while True:
        left = num_requests(url)
        now = time.monotonic()
        if left is None or (left == 0 and now >= quiet_until) or now >= deadline:
            return left or 0
        time.sleep(POLL_S)


def _mark_draining(database: Database, url: str) -> bool:
    with database.begin() as conn:
        return engines.drain(conn, url)


def _is_removed(database: Database, url: str) -> bool:
    with database.begin() as conn:
        return not engines.known(conn, url)


def _forget(database: Database, url: str) -> bool:
    with database.begin() as conn:
        return engines.remove(conn, url)


def _quietly(change: Callable[[], bool]) -> bool:
    """The end is not held up by a database that is away: its keepers find the engine gone."""
    try:
        return change()
    except (DatabaseUnavailable, SetupError):
        return False


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
