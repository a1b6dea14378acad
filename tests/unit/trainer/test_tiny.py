from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import TINY_MODELS
from common.errors import SetupError
from trainer.tiny import CHAT_TEMPLATE, VOCAB_SIZE, make_folder, make_model, make_tokenizer

SHIPPED = sorted(folder.name for folder in TINY_MODELS.iterdir() if folder.is_dir())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_MODELS / SHIPPED[0] / "tokenizer.json"))


def test_both_policies_are_shipped() -> None:
    assert SHIPPED == ["tiny-calculator", "tiny-shell"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_folder_is_small_and_matches_the_code(name: str) -> None:
    folder = TINY_MODELS / name

    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    close_id = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == close_id
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float16
    assert 150_000 < model.num_parameters() < 170_000


def test_every_two_digit_number_is_one_token(tokenizer: Tokenizer) -> None:
    assert all(len(tokenizer.encode(str(number)).ids) == 1 for number in range(100))
    assert tokenizer.encode("12345").tokens == ["12", "34", "5"]


@pytest.mark.parametrize("text", ["a\tb\n\n c", "naïve 😀 42", "<tool_call>{}</tool_call>"])
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(SetupError, match=f"of {VOCAB_SIZE} tokenizer entries"):
        make_tokenizer(["too little"])


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (make_model(eos_id=2, pad_id=0, seed=seed).state_dict() for seed in (1, 1, 2))

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert first["model.embed_tokens.weight"].std().item() == pytest.approx(0.12, abs=0.005)


def test_a_folder_is_made_from_texts_alone(tmp_path: Path) -> None:
    corpus = tmp_path / "texts.txt"
    words = [f"{a}{b}{c}" for a in "bcdfghvwxz" for b in "aeiou" for c in "klmnprst"]
    corpus.write_text("\n".join(" ".join(words) for _ in range(3)))

    make_folder(tmp_path / "policy", [corpus], seed=0)

    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<|im_end|>"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config.vocab_size == VOCAB_SIZE
