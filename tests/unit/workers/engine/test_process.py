"""The engine as a process: readiness, stopping, start-up errors, and what is told once decoding is dead."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from workers.engine.__main__ import Engine, main
from workers.engine.checkpoint import expected_shapes, read_config, read_tensors
from workers.engine.model import Weights, fuse

DEADLINE_S = 60.0


async def test_a_process_serves_until_sigterm_and_then_answers_what_is_open(base: Path) -> None:
    arguments = ["--model", str(base), "--served-model-name", "tiny", "--port", "0", "--max-batch", "4"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.engine", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        ready = (await asyncio.wait_for(process.stderr.readline(), DEADLINE_S)).decode()
        assert "engine ready url=http://127.0.0.1:" in ready
        assert "stand-in for vLLM" in ready
        url = ready.partition("url=")[2].split()[0]
        body = {"token_ids": [5], "sampling_params": {"max_tokens": 2000, "ignore_eos": True, "logprobs": 0}}
        async with aiohttp.ClientSession() as session:
            open_request = asyncio.create_task(session.post(f"{url}/inference/v1/generate", json=body))
            await _until_sampling(session, url)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            async with await open_request as answer:
                assert (await answer.json())["choices"][0]["finish_reason"] == "abort"
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
            assert time.monotonic() - asked < 2
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until_sampling(session: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        async with session.get(f"{url}/metrics") as answer:
            if 'num_requests_running{engine="0",model_name="tiny"} 1' in await answer.text():
                return
        assert time.monotonic() < deadline


def run_main(model: Path, *, port: int = 0, more: tuple[str, ...] = ()) -> int:
    return main(["--model", str(model), "--served-model-name", "tiny", "--port", str(port), *more])


def test_a_port_in_use_is_one_line_and_exit_code_1(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert run_main(base, port=port) == 1
    assert capsys.readouterr().err == f"engine: 127.0.0.1:{port} is in use; choose another --port\n"


def _edit_config(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (shutil.rmtree, "config.json cannot be read: No such file or directory; give --model a checkpoint folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (_edit_config("Qwen3ForCausalLM", "LlamaForCausalLM"), "serves only Qwen3ForCausalLM"),
        (_edit_config('"rope_type": "default"', '"rope_type": "dynamic", "factor": 2.0'), "rope_type 'dynamic'"),
        (_edit_config('"head_dim": 32', '"head_dim": "32"'), "Field 'head_dim' expected int"),
        (_edit_config('"num_attention_heads": 4', '"num_attention_heads": 0'), "num_attention_heads 0, expected at"),
        (_edit_config('"num_key_value_heads": 2', '"num_key_value_heads": 3'), "4 query heads for 3 key-value heads"),
        (_edit_config('"eos_token_id": 3', '"eos_token_id": 576'), "names 576 as eos_token_id"),
        (_edit_config('"hidden_size": 64', '"hidden_size": 32'), "the model needs"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
    ],
)
def test_a_damaged_model_folder_is_one_line_and_exit_code_1(
    damage: Callable[[Path], object],
    told: str,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    damage(folder)
    assert run_main(folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine: ")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--max-model-len", "9999"), "--max-model-len 9999 exceeds the model's 2048 positions"),
        (("--max-batch", "4000"), "lower --max-batch 4000 or --max-model-len 2048"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    more: tuple[str, ...], told: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(base, more=more) == 1
    assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def weights(base: Path) -> Weights:
    config = read_config(base)
    return fuse(config, read_tensors(base, expected_shapes(config)))


async def test_health_is_503_once_the_decoding_thread_has_died(
    client: Any, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    unfit = dataclasses.replace(weights, head_VD=torch.zeros(3, 3))
    await asyncio.wrap_future(client.engine.decoding.call(lambda batch: batch.swap_weights(unfit)))
    body = {"token_ids": [5], "sampling_params": {}}
    status, answer = await client.post("/inference/v1/generate", body)
    assert status == 503
    assert "the decoding thread has ended" in answer["error"]["message"]
    assert (await client.get("/health"))[0] == 503
    assert (await client.post("/inference/v1/generate", body))[0] == 503
    assert (await client.post("/resume"))[0] == 503
    assert "the decoding thread failed" in caplog.text


async def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine(client: Any, weights: Weights) -> None:
    broken = dataclasses.replace(weights, head_VD=torch.full_like(weights.head_VD, torch.nan))
    await asyncio.wrap_future(client.engine.decoding.call(lambda batch: batch.swap_weights(broken)))
    status, answer = await client.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}})
    assert status == 500
    assert "weight version default gave request" in answer["error"]["message"]
    await asyncio.wrap_future(client.engine.decoding.call(lambda batch: batch.swap_weights(weights)))
    assert len((await client.generate([5], max_tokens=3, ignore_eos=True))["token_ids"]) == 3


def test_stopping_an_idle_engine_takes_no_time(base: Path, start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(base)
    started = time.monotonic()
    assert engine.decoding.stop(timeout_s=5)
    assert time.monotonic() - started < 0.5
    assert not engine.decoding.alive
