"""Real vLLM servers for the tests, the models that they serve, and the figures that the last line of a run shows."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.errors import SetupError
from common.weights import Published, WeightStore
from deploy.ports import free_port
from deploy.process import Process
from deploy.vllm import DEFAULT_PYTHON, VllmPlan, find_build, vllm_spec
from trainer.publish import version_writer

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
RUN = "vllm-test"
OWN_SAMPLING = ("--generation-config", "auto")
"""vLLM's default."""


def require_vllm() -> None:
    """Fail in CI, skip on a laptop, where there is no environment with vLLM."""
    try:
        find_build(DEFAULT_PYTHON)
    except SetupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@contextmanager
def serving(model: Path, *, log_file: Path, **choices: Any) -> Iterator[str]:
    """URL of a server on the model; its process group is gone at the end of the block."""
    port = free_port()
    spec = vllm_spec(VllmPlan(model=model, served_name="policy", port=port, **choices))
    process = Process(spec, log_file=log_file, mark="VLLM_TEST=1")
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        assert spec.ready is not None
        while not spec.ready():
            assert process.exit_code() is None, f"vLLM ended:\n{process.log_tail()}"
            assert time.monotonic() < deadline, f"vLLM is not up after {START_TIMEOUT_S} s:\n{process.log_tail()}"
            time.sleep(POLL_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.ask_to_stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while process.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        process.kill_group()
        while process.exit_code() is None:
            assert time.monotonic() < deadline + STOP_TIMEOUT_S, f"process {process.pid} cannot be killed"
            time.sleep(POLL_S)


def with_own_sampling(model: Path, folder: Path) -> Path:
    """A copy of the model whose generation_config.json changes all that a server takes defaults for, and ends turns at
    more ids. Served with `OWN_SAMPLING`, it is what a server looks like that somebody else started."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    own = {"do_sample": True, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 0.6, "repetition_penalty": 1.3}
    ends = {"eos_token_id": [2, 25, 26, 27], "max_new_tokens": 7}
    path.write_text(json.dumps(json.loads(path.read_text()) | own | ends))
    return folder


def make_model(*, seed: int, tied: bool) -> Qwen3ForCausalLM:
    """A random float32 model, peaked enough that wrong weights show in every log-prob."""
    shape: dict[str, Any] = {
        "vocab_size": 576,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.12,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    torch.set_rng_state(state)
    return model


def publish(store: WeightStore, number: int, model: Any, *, tokenizer: Path) -> Published:
    """The model as version `number` of the tests' run, with the tokenizer files of another folder."""
    return store.publish(RUN, number, version_writer(model, start=tokenizer))
