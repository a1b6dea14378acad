"""A model that scores rows otherwise than taken for granted is refused before it trains, and by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.config_train import TrainConfig
from common.errors import SetupError
from trainer.modelling import attend_within_rows
from trainer.policy import Policy
from trainer.ranks import AgreedSetupError
from trainer.samples import Sample, pad
from trainer.start_check import check_rows_apart, head_is_last

MakeSample = Callable[..., Sample]

VOCABULARY = 576
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LEAKING: dict[str, dict[str, Any]] = {
    "nemotron": LLAMA,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
}
PACKED: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": LLAMA | {"num_local_experts": 4},
    "phi3": LLAMA | {"sliding_window": 64},
    "gpt2": GPT2,
    # Its layers have dropout without a module of its own.
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.5,
    },
    "gptj": GPT2 | {"rotary_dim": 8},
}


def model_of(kind: str, **config: Any) -> PreTrainedModel:
    """Random weights of an architecture, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **config))
    assert isinstance(made, PreTrainedModel)
    return made.float().eval()


def policy_of(model: PreTrainedModel, **train: object) -> Policy:
    return Policy(model, train=TrainConfig.model_validate(train), temperature=1.0, seed=0)


@pytest.fixture
def rows(make_random_sample: MakeSample) -> list[Sample]:
    return [make_random_sample(number, length=8 + 8 * number) for number in range(3)]


@pytest.mark.parametrize("kind", LEAKING)
def test_packing_is_refused_where_rows_would_see_each_other(kind: str, rows: list[Sample]) -> None:
    model = model_of(kind, **LEAKING[kind])
    with pytest.raises(SetupError, match=f"^train.packing: .*{type(model).__name__}.*packing = false$"):
        policy_of(model, packing=True)
    padded = policy_of(model_of(kind, **LEAKING[kind]))
    with torch.no_grad():
        together, alone = padded.logprobs(pad(rows))[0], padded.logprobs(pad(rows[:1]))[0]
    torch.testing.assert_close(together[: len(alone)], alone)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_score_as_padded_ones(kind: str, rows: list[Sample]) -> None:
    padded, packed = (policy_of(model_of(kind, **PACKED[kind]), packing=packing) for packing in (False, True))
    with torch.no_grad():
        np.testing.assert_allclose(packed.logprobs(pad(rows)), padded.logprobs(pad(rows)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_packing_is_refused_where_attention_has_a_window(kind: str) -> None:
    with pytest.raises(SetupError, match=r"sliding_attention.*'flash_attention_2' or .*packing = false$"):
        policy_of(model_of(kind, **LLAMA, sliding_window=8), packing=True)


def test_packing_is_refused_where_logits_prove_nothing() -> None:
    model = model_of("llama", **LLAMA)
    model.lm_head.weight.data.zero_()
    with pytest.raises(SetupError, match="packing = false"):
        policy_of(model, packing=True)
    policy_of(model_of("llama", **LLAMA))


def test_attention_without_row_lengths_is_an_error() -> None:
    states = torch.zeros(1, 2, 6, 4)
    with pytest.raises(SetupError, match="Identity is not told where rows begin"):
        attend_within_rows(torch.nn.Identity(), states, states, states, None)


def attend_by_ends(
    module: torch.nn.Module, query: torch.Tensor, *states: Any, cu_seq_lens_q: torch.Tensor | None = None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What flash attention does with its arguments, by torch's own kernel."""
    key, value, _ = states
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    parts = zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in parts], dim=1), None


@pytest.mark.parametrize(("kind", "refused"), [("llama", False), ("nemotron", True), ("bloom", True)])
def test_lost_sequence_ends_are_seen_in_bfloat16(kind: str, refused: bool) -> None:
    AttentionInterface.register("attend_by_ends", attend_by_ends)
    model = model_of(kind, **LEAKING.get(kind, LLAMA), initializer_range=0.2)
    model.set_attn_implementation("attend_by_ends")
    train = TrainConfig(packing=True, dtype="bfloat16", attention="flash_attention_2")
    if refused:
        with pytest.raises(SetupError, match="packing = false"):
            check_rows_apart(model, train=train)
    else:
        check_rows_apart(model, train=train)


def test_a_model_that_looks_ahead_is_refused() -> None:
    bert = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    with pytest.raises(SetupError, match=r"BertLMHeadModel.*is not causal"):
        policy_of(model_of("bert", **bert))
    policy_of(model_of("bert", **bert, is_decoder=True))


def test_attention_that_a_model_lacks_is_refused_with_what_exists() -> None:
    with pytest.raises(SetupError, match="Gemma2ForCausalLM does not support") as caught:
        policy_of(model_of("gemma2", **LLAMA, head_dim=8))
    assert str(caught.value).endswith("Take 'flash_attention_2' or 'flash_attention_3', if that is installed")
    assert "eager" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "config", "last"),
    [
        ("llama", {}, True),
        # The row of id 0 is zero, and so would all logits be.
        ("granite", {"logits_scaling": 8.0}, False),
        ("granite", {"logits_scaling": 1.0}, True),
        ("cohere", {"logit_scale": 0.25}, False),
        # Far below the cap, random weights hardly show it.
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}, False),
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": None}, True),
    ],
)
def test_what_follows_the_head_is_seen(kind: str, config: dict[str, Any], last: bool) -> None:
    assert head_is_last(model_of(kind, **LLAMA, **config)) is last


def test_too_few_logits_are_refused_at_the_start(rows: list[Sample]) -> None:
    granite = LLAMA | {"logits_scaling": 8.0}
    with pytest.raises(
        SetupError, match=rf"^train.max_logits = 999 .*GraniteForC.*raise max_logits to {50 * VOCABULARY}"
    ):
        policy_of(model_of("granite", **granite), max_logits=999, max_positions=50)
    policy_of(model_of("llama", **LLAMA), max_logits=999, max_positions=50)
    policy = policy_of(model_of("granite", **granite), max_logits=12 * VOCABULARY, max_positions=12)
    # Before any rank has begun to compute, and so that all of them end in order.
    with pytest.raises(AgreedSetupError, match=f"raise max_logits to {24 * VOCABULARY}"):
        policy.train_step(rows, {row.episode_id: 1.0 for row in rows}, version=0)
