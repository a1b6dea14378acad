"""The commands around engines: `rollmill engine serve|add|list|drain|remove`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.errors import SetupError
from deploy.engine import MODEL_NAME
from deploy.options import DataDir, settings_for
from deploy.vllm import DEFAULT_PYTHON

engine_app = typer.Typer(no_args_is_help=True, help="Start vLLM servers, and give servers to runs.")

Url = Annotated[str, typer.Argument(help="http://HOST:PORT")]
RunName = Annotated[str, typer.Option("--run", help="The run that it serves.")]
ModelName = Annotated[str, typer.Option("--model-name", help="The name that the engine gives the model.")]


@engine_app.command(
    epilog="[bold]rollmill engine serve ./model --run my-run[/]   ·   "
    "[bold]rollmill engine serve ./model --run my-run --tensor-parallel 2 -- --gpu-memory-utilization 0.8[/]"
)
def serve(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder to start from.")],
    run: RunName,
    extra: Annotated[list[str] | None, typer.Argument(help="After --: further arguments of vLLM's.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, show_default="a free one")] = None,
    python: Annotated[Path, typer.Option(help="Interpreter with vLLM, CPU or GPU build.")] = DEFAULT_PYTHON,
    dtype: Annotated[str | None, typer.Option(show_default="float32 on CPU, the checkpoint's on GPU")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, show_default="the model's")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 64,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks of one model.")] = 1,
    drain_seconds: Annotated[float, typer.Option(min=0, help="For running requests at the end.")] = 60.0,
    data_dir: DataDir = None,
) -> None:
    """Start vLLM for a run, keep it alive, and drain it on Ctrl-C, SIGTERM or `rollmill engine remove`."""
    settings = settings_for(data_dir)
    from common.db import engines, runs
    from deploy.access import live_database
    from deploy.engine_address import check_no_alias
    from deploy.engine_serve import Service, check_context_fits, check_model_fits, serve_engine
    from deploy.ports import free_port
    from deploy.vllm import VllmPlan, find_build, lora_plan

    if not (model / "config.json").is_file():
        raise SetupError(f"model folder {model.absolute()} holds no model: there is no config.json in it")
    plan = VllmPlan(
        model=model.absolute(),
        served_name=MODEL_NAME,
        port=port or free_port(),
        python=python.absolute(),
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        tensor_parallel=tensor_parallel,
        extra=tuple(extra or ()),
    )
    find_build(plan.python)
    with live_database(settings) as database:
        with database.begin() as conn:
            found = runs.require(conn, run)
            listed = engines.urls(conn)
        check_model_fits(plan.model, found)
        check_context_fits(plan.model, found, max_model_len=max_model_len)
        plan = replace(plan, lora=lora_plan(found.config.train))
        service = Service(plan=plan, run=found, data_dir=settings.data_dir, drain_s=drain_seconds)
        check_no_alias(service.url, listed)
        serve_engine(service, database, console=Console())


@engine_app.command(epilog="[bold]rollmill engine add http://10.0.0.5:8000 --run my-run --model-name qwen[/]")
def add(
    url: Url,
    run: RunName,
    model_name: ModelName = MODEL_NAME,
    force: Annotated[
        bool, typer.Option("--force", help="Take it even from another run, or as a second address.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Give a run a server that somebody else started, once it has proved that it can serve it."""
    settings = settings_for(data_dir)
    from common.db import engines, runs
    from deploy.access import live_database
    from deploy.engine_address import check_no_alias, normal_url
    from deploy.engine_claims import check_unclaimed
    from deploy.engine_probe import REMARKS, check_engine

    address = normal_url(url)
    with live_database(settings) as database:
        with database.begin() as conn:
            found = runs.require(conn, run)
            holder = engines.holder(conn, address)
            listed = engines.urls(conn)
        if not force:
            check_no_alias(address, listed)
            check_unclaimed(address, run=run, holder=holder)
        kind = check_engine(
            address,
            model=found.config.model,
            served_name=model_name,
            temperature=found.config.rollout.temperature,
            top_p=found.config.rollout.top_p,
            max_row_tokens=found.config.rollout.max_row_tokens,
            lora=found.config.train.lora_rank is not None,
        )
        with database.begin() as conn:
            engines.register(conn, address, run_id=found.id)
    _say(f"engine {address} serves run {run}: its keeper loads the newest version within seconds")
    if remark := REMARKS.get(kind):
        _say(remark)


@engine_app.command(name="list")
def list_engines(data_dir: DataDir = None) -> None:
    """List the engines, and what each serves."""
    settings = settings_for(data_dir)
    from common.db import engines
    from deploy.access import open_database
    from deploy.tables import print_engines, table_console

    with open_database(settings) as database, database.begin() as conn:
        print_engines(engines.status(conn), console=table_console())


@engine_app.command(epilog="[bold]rollmill engine drain http://127.0.0.1:8000[/]")
def drain(
    url: Url,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for its running requests.")] = 60.0,
    data_dir: DataDir = None,
) -> None:
    """Give an engine no new work, and wait for what runs on it. `add` takes it back."""
    settings = settings_for(data_dir)
    from common.db import engines
    from deploy.access import live_database
    from deploy.engine_address import listed_as, normal_url
    from deploy.engine_serve import wait_until_idle

    address = normal_url(url)
    with live_database(settings) as database, database.begin() as conn:
        address = listed_as(address, engines.urls(conn)) or address
        if not engines.drain(conn, address):
            raise _unknown(address)
    left = wait_until_idle(address, timeout_s=wait)
    _say(f"engine {address} gets no new work; " + (f"{left} requests still run" if left else "none runs"))


@engine_app.command(epilog="[bold]rollmill engine remove http://127.0.0.1:8000[/]")
def remove(url: Url, data_dir: DataDir = None) -> None:
    """Forget an engine. What `engine serve` started drains and ends; other servers go on, so drain them first."""
    settings = settings_for(data_dir)
    from common.db import engines
    from deploy.access import live_database
    from deploy.engine_address import listed_as, normal_url

    address = normal_url(url)
    with live_database(settings) as database, database.begin() as conn:
        address = listed_as(address, engines.urls(conn)) or address
        if not engines.remove(conn, address):
            raise _unknown(address)
    _say(f"engine {address} is forgotten")


def _unknown(url: str) -> SetupError:
    return SetupError(f"no engine {url} in the database: `rollmill engine list` shows those there are")


def _say(text: str) -> None:
    Console().print(text, highlight=False, soft_wrap=True, markup=False)
