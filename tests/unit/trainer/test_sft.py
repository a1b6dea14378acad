"""`python -m trainer sft` from its arguments to the folder that it writes."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import TINY_MODELS, RunConfig
from tests.unit.trainer.test_imitation import row
from trainer.policy import Policy
from trainer.samples import pad
from trainer.sft import batches, main, schedule
from workers.render import Renderer

START = TINY_MODELS / "tiny-calculator"
ROWS: list[dict[str, Any]] = [{"ids": [1, 9, 10, 11 + number, 5], "weights": [0, 0, 1, 2.5, 0]} for number in range(6)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def sft(rows: Path, out: Path, *options: str, model: Path = START) -> int:
    return main(["--model", str(model), "--rows", str(rows), "--out", str(out), *options])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_batch_has_each_row_once_before_any_comes_again() -> None:
    given = [row([1, number], [0, 1], number=number) for number in range(5)]
    for seed in ("0:0", "7:1"):
        drawn = [one.sample.episode_id for batch in islice(batches(given, size=4, seed=seed), 5) for one in batch]
        assert all(sorted(drawn[start : start + 5]) == [0, 1, 2, 3, 4] for start in range(0, 20, 5))
    first, second = ([one.where for one in next(batches(given, size=5, seed="3:0"))] for _ in range(2))
    assert first == second


def test_rates_warm_up_at_first_and_fall_in_the_last_phase() -> None:
    found = list(schedule([3, 4], warmup_steps=2))
    assert [phase for phase, _ in found] == [0, 0, 0, 1, 1, 1, 1]
    assert [share for _, share in found] == pytest.approx([0.5, 1, 1, 1, 0.7625, 0.525, 0.2875])
    assert [share for _, share in schedule([2], warmup_steps=0)] == pytest.approx([1, 0.525])


def test_the_folder_is_a_model_in_the_dtype_that_it_had_and_the_same_every_time(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--learning-rate", "1e-3", "--batch-size", "4", "--held-out", str(rows), "--held-out-every", "1")
    assert sft(rows, tmp_path / "out", *options) == 0
    said = capsys.readouterr()
    assert said.out.startswith("sft: steps=2 rows=6 loss=")
    assert "step 1/2: loss" in said.err

    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in START.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.float16}
    Renderer.from_folder(tmp_path / "out")

    assert sft(rows, tmp_path / "again", *options) == 0
    taught, again, start = (tensors(folder) for folder in (tmp_path / "out", tmp_path / "again", START))
    assert all(torch.equal(tensor, again[name]) for name, tensor in taught.items())
    assert not torch.equal(taught["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def test_an_adapter_is_merged_and_a_run_can_start_from_it(tmp_path: Path, rows: Path) -> None:
    options = ("--lora-rank", "2", "--learning-rate", "1e-2", "--warmup-steps", "0", "--steps", "4")
    assert sft(rows, tmp_path / "out", *options, "--dtype", "float32") == 0
    written = tensors(tmp_path / "out")
    assert set(written) == set(tensors(START))
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}

    batch = pad([row(one["ids"], one["weights"]).sample for one in ROWS])
    document: dict[str, Any] = {"name": "next", "train": {"lora_rank": 2}}
    with torch.no_grad():
        before, after = (
            Policy.load(RunConfig.model_validate(document | {"model": folder})).logprobs(batch).sum()
            for folder in (START, tmp_path / "out")
        )
    assert after > before + 1


def test_muon_and_two_phases_teach_a_model_whose_config_names_no_pad_id(tmp_path: Path, start_folder: Path) -> None:
    config = json.loads((start_folder / "config.json").read_text())
    model = tmp_path / "model"
    model.mkdir()
    for file in start_folder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    learned = tmp_path / "rows.jsonl"
    learned.write_text(
        "\n".join(json.dumps({"ids": [3, a, 4, a], "weights": [0, 0, 0, 1]}) for a in range(10, 14))
        + '\n{"ids": [3, 9], "weights": [0, 1]}'
    )
    options = ("--rows", str(learned), "--steps", "10", "30", "--optimizer", "muon")

    assert sft(learned, tmp_path / "out", *options, model=model) == 0

    taught = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    logits = taught(input_ids=torch.tensor([[3, a, 4] for a in range(10, 14)])).logits[:, -1]
    assert logits.argmax(dim=-1).tolist() == [10, 11, 12, 13]


def test_a_model_that_is_there_is_replaced_only_by_force_and_a_folder_that_is_none_never(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert sft(rows, out) == 0
    (out / "notes").write_text("mine")
    assert sft(rows, out) == 2
    assert "out is there already: take another --out, or --force to replace it" in capsys.readouterr().err
    before = tensors(out)
    # In place, what lies beside the weights goes over with the tokenizer; from elsewhere it gives way.
    assert sft(rows, out, "--force", "--learning-rate", "1e-3", model=out) == 0
    assert (out / "notes").read_text() == "mine"
    assert not torch.equal(tensors(out)["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert sft(rows, out, "--force") == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in START.iterdir()}

    other = tmp_path / "other"
    other.mkdir()
    (other / "notes").write_text("mine")
    assert sft(rows, other, "--force") == 2
    assert "other holds no model (no config.json), so --force does not replace it" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["notes"]


def test_training_that_fails_leaves_the_old_model_and_no_half_one(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert sft(rows, out) == 0
    before = tensors(out)
    assert sft(rows, out, "--force", "--learning-rate", "1e9", "--steps", "20") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("trainer sft: ")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(out).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "argument --steps: '0' is no whole number of 1 or more"),
        (("--steps", "1", "2"), "1 phases of rows but 2 --steps"),
        (("--min-reward", "1"), "--run and --min-reward belong together"),
        (("--batch-size", "-1"), "argument --batch-size: '-1' is no whole number of 1 or more"),
        (("--run", "first"), "argument --run: not allowed with argument --rows"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, rows: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        sft(rows, tmp_path / "out", *options)
    assert capsys.readouterr().err.splitlines()[-1] == f"python -m trainer sft: error: {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--learning-rate", "0"), "train.learning_rate: Input should be greater than 0 (got '0')"),
        (("--lora-alpha", "4"), "train: lora_alpha = 4 has no effect without lora_rank"),
        (("--optimizer", "muon", "--lora-rank", "2"), "--optimizer muon trains whole matrices: not with --lora-rank"),
        (("--held-out", "nowhere.jsonl"), "[Errno 2] No such file or directory: 'nowhere.jsonl'"),
        (("--model", "nowhere"), "model folder nowhere has no tokenizer.json"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    tmp_path: Path, rows: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft(rows, tmp_path / "out", *options) == 2
    assert capsys.readouterr().err.startswith(f"trainer sft: {message}")
    assert not (tmp_path / "out").exists()
