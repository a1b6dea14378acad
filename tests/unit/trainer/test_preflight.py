"""What the trainer would refuse at its start, said by --dry-run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.config import TINY_MODELS, RunConfig
from common.errors import SetupError
from trainer.preflight import check_start

TEACHER = "train.distill.teacher"


def run_config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "mine", "model": TINY_MODELS / "tiny-calculator"} | sections)


def test_each_thing_that_is_in_order_has_a_line() -> None:
    distill = {"teacher": str(TINY_MODELS / "tiny-calculator")}
    train = {"lora_rank": 4, "lora_modules": ["q_proj", "v_proj"], "distill": distill}
    assert list(check_start(run_config(train=train))) == [
        "Qwen3ForCausalLM computes with attention sdpa",
        "the adapter's layers are there: q_proj, v_proj",
        f"teacher {TINY_MODELS / 'tiny-calculator'} has the run's tokenizer",
    ]


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (
            {"lora_rank": 4, "lora_modules": ["q_prjo"]},
            r"train\.lora_modules: the model has no linear layer q_prjo, it",
        ),
        ({"distill": {"teacher": "/missing"}}, f"model folder /missing is not there: set `{TEACHER}` to a folder"),
        (
            {"distill": {"teacher": "http://127.0.0.1:9"}},
            rf"{TEACHER} = http://127\.0\.0\.1:9 is away: .*Start it before the run",
        ),
    ],
)
def test_what_the_start_refuses_is_refused_before(train: dict[str, object], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        list(check_start(run_config(train=train)))


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_attention_that_is_not_installed_is_refused() -> None:
    train = {"attention": "flash_attention_2", "dtype": "bfloat16"}
    with pytest.raises(SetupError, match=r"train\.attention = 'flash_attention_2': "):
        list(check_start(run_config(train=train)))


def test_sink_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's way to say so, where it is
    with pytest.raises(SetupError, match=r"tracking\.sinks: wandb is not installed here: pip install wandb"):
        list(check_start(run_config(tracking={"sinks": ["wandb"]})))


def test_model_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(SetupError, match=f"model folder {tmp_path} cannot be loaded"):
        list(check_start(run_config(model=tmp_path)))
