"""New weights in a running engine: pauses, version spans, and folders that must not be loaded."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.engine.sampling import SamplingParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
ENDLESS = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}


async def load(client: Any, folder: Path, version: str, *claim: str) -> Any:
    arguments = [str(folder), version, *claim]
    status, answer = await client.post("/collective_rpc", {"method": "load_version", "args": arguments})
    assert status == 200
    (result,) = answer["results"]
    return result


async def start_endless(client: Any, *, num_tokens: int) -> asyncio.Task[Any]:
    """A greedy request that has sampled some tokens and would go on for long."""
    before = await client.metric("generation_tokens_total")
    task = asyncio.create_task(client.generate(PROMPT, **ENDLESS))
    await client.wait_for("generation_tokens_total", lambda count: count >= before + num_tokens)
    return task


async def finish_endless(client: Any, task: asyncio.Task[Any], *, num_tokens: int) -> Any:
    """Let it sample some more, then end it."""
    before = await client.metric("generation_tokens_total")
    await client.wait_for("generation_tokens_total", lambda count: count >= before + num_tokens)
    await client.post("/abort_requests", {"request_ids": []})
    return await task


async def test_a_kept_request_goes_on_under_the_new_weights_as_if_prefilled_by_them(
    client: Any, base: Path, version_7: Path, reference: Any
) -> None:
    task = await start_endless(client, num_tokens=30)
    assert await client.post("/pause?mode=keep") == (200, {"status": "paused"})
    assert await client.get("/is_paused") == (200, {"is_paused": True})
    result = await load(client, version_7, "run/000007")
    assert (result["ok"], result["version"]) == (True, "run/000007")
    assert 0 < result["seconds"] < 20
    assert await client.get("/weight_info") == (200, {"weight_version": "default"})
    assert await client.post("/update_weight_version", {"new_version": "run/000007"}) == (200, {"success": True})
    assert await client.get("/weight_info") == (200, {"weight_version": "run/000007"})
    assert await client.post("/resume") == (200, {"status": "resumed"})
    choice = await finish_endless(client, task, num_tokens=40)

    ids = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    old, new = choice["weight_versions"]
    split = new["start"]
    assert (old, new["version"]) == ({"version": "default", "start": 0, "end": split}, "run/000007")
    assert 30 <= split <= len(ids) - 40
    assert new["end"] == len(ids)
    fresh = await client.generate(PROMPT + ids[:split], temperature=0, max_tokens=40, ignore_eos=True)
    assert fresh["token_ids"] == ids[split : split + 40]
    fresh_logprobs = [entry["logprob"] for entry in fresh["logprobs"]["content"]]
    assert fresh_logprobs == pytest.approx(logprobs[split : split + 40], abs=1e-4)
    # And both halves are what transformers gives for their weights.
    whole = PROMPT + ids
    for folder, start, end in ((base, 0, split), (version_7, split, len(ids))):
        params = SamplingParams(temperature=0)
        expected_TV = reference.logprobs_TV(folder, whole[: len(PROMPT) + end], params, start=len(PROMPT) + start)
        expected_T = expected_TV.gather(1, torch.tensor(ids[start:end])[:, None])[:, 0].tolist()
        assert logprobs[start:end] == pytest.approx(expected_T, abs=1e-4)


async def test_keeping_the_cache_goes_on_with_the_old_keys_until_it_is_reset(client: Any, version_7: Path) -> None:
    task = await start_endless(client, num_tokens=30)
    await client.post("/pause?mode=keep&clear_cache=false")
    await load(client, version_7, "v7")
    await client.post("/update_weight_version", {"new_version": "v7"})
    await client.post("/resume")
    stale = await finish_endless(client, task, num_tokens=20)
    split = stale["weight_versions"][1]["start"]
    fresh = await client.generate(PROMPT + stale["token_ids"][:split], temperature=0, max_tokens=20, ignore_eos=True)
    assert fresh["logprobs"]["content"][1]["logprob"] != pytest.approx(
        stale["logprobs"]["content"][split + 1]["logprob"], abs=1e-4
    )

    task = await start_endless(client, num_tokens=5)
    await client.post("/pause?mode=keep&clear_cache=false")
    assert await client.post("/reset_prefix_cache?reset_running_requests=true") == (200, {"success": True})
    await client.post("/resume")
    again = await finish_endless(client, task, num_tokens=20)
    same = await client.generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True)
    assert again["token_ids"][:20] == same["token_ids"]


async def test_a_version_set_between_two_requests_marks_only_the_second(client: Any) -> None:
    first = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    await client.post("/update_weight_version", {"new_version": "v1"})
    second = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert first["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert second["weight_versions"] == [{"version": "v1", "start": 0, "end": 4}]


async def test_pause_in_mode_abort_ends_running_requests_and_queues_new_ones(client: Any, version_7: Path) -> None:
    old = await client.generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True)
    task = await start_endless(client, num_tokens=10)
    assert (await client.post("/pause"))[0] == 200
    assert (await task)["finish_reason"] == "abort"
    queued = asyncio.create_task(client.generate(PROMPT, temperature=0, max_tokens=20, ignore_eos=True))
    await client.wait_for("num_requests_waiting", lambda count: count == 1)
    await load(client, version_7, "v7")
    await client.post("/update_weight_version", {"new_version": "v7"})
    assert not queued.done()
    await client.post("/resume")
    choice = await queued
    assert choice["weight_versions"] == [{"version": "v7", "start": 0, "end": 20}]
    assert choice["token_ids"] != old["token_ids"]


async def test_pause_in_mode_wait_answers_when_the_running_requests_are_done(client: Any) -> None:
    running = asyncio.create_task(client.generate(PROMPT, max_tokens=300, ignore_eos=True))
    await client.wait_for("num_requests_running", lambda count: count == 1)
    assert (await client.post("/pause?mode=wait"))[0] == 200
    assert await client.metric("num_requests_running") == 0
    choice = await running
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 300)
    queued = asyncio.create_task(client.generate(PROMPT, max_tokens=3, ignore_eos=True))
    await client.wait_for("num_requests_waiting", lambda count: count == 1)
    await client.post("/resume")
    assert len((await queued)["token_ids"]) == 3


async def test_pause_and_resume_may_be_repeated(client: Any) -> None:
    for _ in range(2):
        assert (await client.post("/pause?mode=keep"))[0] == 200
        assert await client.get("/is_paused") == (200, {"is_paused": True})
    for _ in range(2):
        assert (await client.post("/resume"))[0] == 200
        assert await client.get("/is_paused") == (200, {"is_paused": False})
    assert len((await client.generate(PROMPT, max_tokens=3, ignore_eos=True))["token_ids"]) == 3


async def test_a_frozen_request_samples_nothing(client: Any) -> None:
    task = await start_endless(client, num_tokens=5)
    await client.post("/pause?mode=keep")
    frozen_at = await client.metric("generation_tokens_total")
    await client.post("/update_weight_version", {"new_version": "v1"})
    assert await client.metric("generation_tokens_total") == frozen_at
    assert not task.done()
    await client.post("/pause?mode=abort")
    assert len((await task)["token_ids"]) == frozen_at


@pytest.mark.parametrize(
    ("path", "told"),
    [("/pause?mode=later", "mode: expected one of abort, wait, keep"), ("/pause?clear_cache=1", "clear_cache")],
)
async def test_a_mistyped_pause_is_refused_and_pauses_nothing(path: str, told: str, client: Any) -> None:
    status, answer = await client.post(path)
    assert status == 400
    assert told in answer["error"]["message"]
    assert await client.get("/is_paused") == (200, {"is_paused": False})


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    (folder / "manifest.json").unlink()


def _cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    (folder / "manifest.json").unlink()


def _flip_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["model.norm.weight"]["dtype"] = "F32"
    path.write_text(json.dumps(manifest))


def _add_file(folder: Path) -> None:
    save_file({"model.extra": torch.zeros(2)}, folder / "extra.safetensors")


NORM = "model.norm.weight"
BREAKAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "has no *.safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
    "cut short": (_cut_file, "model.safetensors cannot be read"),
    "one bit": (_flip_byte, "has sha256"),
    "unknown file": (_add_file, "is not named in manifest.json"),
    "manifest differs": (_edit_manifest, "the manifest says"),
    "manifest no JSON": (lambda folder: _write(folder / "manifest.json", "{"), "is not a manifest"),
    "tensor missing": (lambda f: _rewrite(f, lambda t: _drop(t, NORM)), f"lacks 1 of 24 tensors, first {NORM}"),
    "tensor unknown": (lambda f: _rewrite(f, lambda t: t.update(x=torch.zeros(1))), "tensor x is not part"),
    "shape": (lambda f: _rewrite(f, lambda t: t.update({NORM: torch.ones(63)})), "shape (63,), the model needs (64,)"),
    "type": (lambda f: _rewrite(f, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)})), "is I32"),
    "not finite": (lambda f: _rewrite(f, lambda t: t.update({NORM: torch.full((64,), torch.nan)})), "holds a NaN"),
}


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


async def test_broken_folders_are_refused_and_the_old_weights_serve_on(
    client: Any, version_7: Path, tmp_path: Path
) -> None:
    before = await client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    for name, (break_it, told) in BREAKAGES.items():
        folder = tmp_path / name
        shutil.copytree(version_7, folder)
        break_it(folder)
        result = await load(client, folder, "broken")
        assert result["ok"] is False, name
        assert told in result["error"], name
        after = await client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        assert after == before, name
    assert await client.get("/weight_info") == (200, {"weight_version": "default"})
    assert (await load(client, version_7, "v7"))["ok"] is True
    assert await client.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True) != before


async def test_a_tied_head_in_the_file_and_other_float_types_are_taken(
    client: Any, version_7: Path, tmp_path: Path
) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(version_7 / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert (await load(client, tmp_path, "v7"))["ok"] is True


async def test_weights_without_pause_take_over_between_two_steps(client: Any, version_7: Path) -> None:
    task = await start_endless(client, num_tokens=10)
    assert (await load(client, version_7, "v7"))["ok"] is True
    await client.post("/update_weight_version", {"new_version": "v7"})
    choice = await finish_endless(client, task, num_tokens=10)
    assert [span["version"] for span in choice["weight_versions"]] == ["default", "v7"]


async def test_a_load_under_an_older_claim_is_refused(client: Any, base: Path, version_7: Path) -> None:
    assert (await load(client, version_7, "v7", "7"))["ok"] is True
    late = {"ok": False, "superseded": True, "error": "claim 6 is older than 7"}
    assert await load(client, base, "v6", "6") == late
    assert (await load(client, base, "v6", "7"))["ok"] is True
    assert (await load(client, base, "v6"))["ok"] is True, "without a claim it is not judged"


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"method": "nothing", "args": []}, 500, "unknown method 'nothing'"),
        ({"method": "load_version", "args": ["/tmp"]}, 400, "takes a folder and a version"),
        ({"method": "load_version", "args": ["/tmp", "v", "x"]}, 400, "and perhaps a claim"),
        ({"method": "load_version", "args": ["/tmp", 7]}, 400, "args.1: Input should be a valid string (got 7)"),
    ],
)
async def test_a_bad_call_is_refused(body: object, status: int, told: str, client: Any) -> None:
    found, answer = await client.post("/collective_rpc", body)
    assert found == status
    assert told in answer["error"]["message"]
