"""An adapter and its start weights as one model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.config import TINY_MODELS
from common.errors import SetupError
from common.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightStore
from tests.lora import make_adapted, publish_adapter
from trainer.merge import merge
from trainer.modelling import load_model

BASE = TINY_MODELS / "tiny-calculator"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return publish_adapter(WeightStore(tmp_path / "weights"), "run", 3, make_adapted(BASE, seed=1)).path


def test_the_merged_model_computes_what_the_adapted_one_does(adapter: Path, tmp_path: Path) -> None:
    merge(adapter, base=BASE, out=tmp_path / "made" / "whole")
    ids_BL = torch.arange(5, 25)[None]
    with torch.no_grad():
        wanted, start, found = (
            model(input_ids=ids_BL).logits
            for model in (make_adapted(BASE, seed=1), load_model(BASE), load_model(tmp_path / "made" / "whole"))
        )
    assert (found - wanted).abs().max() < 1e-4
    assert (found - start).abs().max() > 1e-2
    assert (tmp_path / "made" / "whole" / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["whole"]


def test_an_adapter_of_another_model_is_refused_with_the_layer(adapter: Path, tmp_path: Path) -> None:
    for field, value, why in (
        ("num_hidden_layers", 1, r"no linear layer model\.layers\.1\."),
        ("intermediate_size", 8, r"model\.layers\.0\.mlp\.down_proj has inputs of 8, the adapter's of "),
    ):
        other = tmp_path / field
        other.mkdir()
        for file in BASE.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        config = json.loads((BASE / "config.json").read_text()) | {field: value}
        config.pop("layer_types", None)
        (other / "config.json").write_text(json.dumps(config))
        (other / "model.safetensors").unlink()
        type(load_model(BASE))(load_model(BASE).config.__class__.from_dict(config)).save_pretrained(other)
        with pytest.raises(SetupError, match=f"is of another model than {other}.*{why}"):
            merge(adapter, base=other, out=tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_damaged_adapter_is_refused_with_the_file(adapter: Path, tmp_path: Path) -> None:
    (adapter / ADAPTER_WEIGHTS).write_bytes((adapter / ADAPTER_WEIGHTS).read_bytes()[:-1])
    with pytest.raises(SetupError, match=f"adapter {adapter} cannot be merged into model {BASE}: .*{ADAPTER_WEIGHTS}"):
        merge(adapter, base=BASE, out=tmp_path / "whole")


def test_an_adapter_where_a_model_should_be_is_called_one(adapter: Path) -> None:
    with pytest.raises(SetupError) as refused:
        load_model(adapter)
    assert str(refused.value) == (
        f"model = {adapter} is a LoRA adapter, not a whole model: set `model` to its start weights, {BASE}; "
        "`rollmill eval --model` plays tasks with an adapter over them"
    )
    (adapter / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(SetupError) as refused:
        load_model(adapter, field="train.distill.teacher")
    assert str(refused.value) == (
        f"train.distill.teacher = {adapter} is a LoRA adapter, not a whole model: set `train.distill.teacher` to its "
        "start weights"
    )
