"""Models of each family, with real vocabularies and structure, that write tool calls after seconds of training.

They are as small as they can be, and wrong about the task: what counts is that they write turns in the family's form,
with ids from all over the vocabulary in between.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import RenderConfig
from common.episode import Message
from tests.unit.workers.model_families import HYBRID, LLAMA, PLAIN, QWEN, THINKING, Published
from tests.vocabularies import byte_model, shipped_ranks
from workers.handlers.calculator import Calculator
from workers.render import Renderer

NUM_ENTRIES = 4096
"""Of the vocabulary, its own special tokens apart. Sampling from all 150,000 would take minutes here; that prompts are
right with all of them is tested without an engine."""
NUM_DIALOGUES = 64
NUM_STEPS = 48
BATCH_SIZE = 8
LEARNING_RATE = 1e-2
NOISE = 0.005
"""Share of tokens that are drawn from the whole vocabulary at temperature 1."""
UNFINISHED = 0.8
"""Share of third turns that call the tool again."""
OTHER_ENDS = 0.1
"""Share of turns that end with the last of the family's stop tokens: then the suffix begins with the close token."""
THOUGHTS = ("so", "weigh e\u0301 \u00e9", "\u6f22\u5b57 first", "\U0001f333 left")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family, as the tests make a model of it."""

    name: str
    published: Published
    vocabulary: str
    model_type: str
    """Of transformers."""
    tied: bool
    template_kwargs: dict[str, JsonValue]
    thinks: bool = False

    @property
    def render(self) -> RenderConfig:
        return RenderConfig(template_kwargs=self.template_kwargs)

    def tokenizer(self) -> Tokenizer:
        is_llama = self.published is LLAMA
        ranks = shipped_ranks(self.vocabulary, num_entries=NUM_ENTRIES)
        return self.published.dress(byte_model(ranks, ignore_merges=is_llama))

    def turn(self, expression: str | None, thought: str) -> str:
        """Text of a turn that calls the tool, or that answers."""
        said = f"{thought}\n</think>\n\n" if self.thinks else ""
        if expression is None:
            return f"{said}answer: {thought}"
        if self.published is LLAMA:
            return said + json.dumps({"name": "calc", "parameters": {"expr": expression}})
        call = json.dumps({"name": "calc", "arguments": {"expr": expression}})
        return f"{said}<tool_call>\n{call}\n</tool_call>"


FAMILIES = (
    Family(
        name="qwen3-thinking",
        published=THINKING,
        vocabulary="qwen",
        model_type="qwen3",
        tied=False,
        template_kwargs={},
        thinks=True,
    ),
    Family(
        name="qwen3-instruct",
        published=HYBRID,
        vocabulary="qwen",
        model_type="qwen3",
        tied=False,
        template_kwargs={"enable_thinking": False},
    ),
    Family(name="qwen2.5", published=QWEN, vocabulary="qwen", model_type="qwen2", tied=True, template_kwargs={}),
    Family(name="llama3", published=LLAMA, vocabulary="llama", model_type="llama", tied=True, template_kwargs={}),
    Family(name="chatml", published=PLAIN, vocabulary="qwen", model_type="llama", tied=False, template_kwargs={}),
)


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """One to imitate."""

    ids: list[int]
    mask: list[bool]
    """True on what the policy writes."""


def make_warm_model(family: Family, folder: Path) -> Path:
    """Train a new model on dialogues of two to four turns, and write it in float32."""
    folder.mkdir()
    tokenizer = family.tokenizer()
    family.published.write(folder, tokenizer=tokenizer)
    renderer = Renderer.from_folder(folder, template_kwargs=family.template_kwargs)
    disable_progress_bar()
    torch.manual_seed(0)
    model = _new_model(family, tokenizer, eos_id=renderer.close_id)
    _train(model, list(_dialogues(family, renderer, tokenizer)))
    model.save_pretrained(folder)
    return folder


def _new_model(family: Family, tokenizer: Tokenizer, *, eos_id: int) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": family.tied,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }
    if family.model_type == "qwen2":
        del shape["head_dim"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **shape), dtype=torch.float32)


def _dialogues(family: Family, renderer: Renderer, tokenizer: Tokenizer) -> Iterator[Dialogue]:
    rng = random.Random(family.name)
    handler = Calculator()
    for payload in handler.tasks(seed=1, num_tasks=NUM_DIALOGUES):
        prepared = handler.init(payload)
        ids = renderer.first_prompt(prepared.messages, prepared.tools)
        mask = [False] * len(ids)
        for index in range(4):
            calls = index < 2 or (index == 2 and rng.random() < UNFINISHED)
            expression = f"{rng.randint(0, 99)} {rng.choice('+-')} {rng.randint(0, 99)}" if calls else None
            said = tokenizer.encode(family.turn(expression, rng.choice(THOUGHTS)), add_special_tokens=False).ids
            said.append(renderer.stop_ids[-1] if rng.random() < OTHER_ENDS else renderer.close_id)
            ids += said
            mask += [True] * len(said)
            if not calls:
                break
            suffix = renderer.suffix([Message(role="tool", content=str(rng.randint(0, 99)))], after=said)
            ids += suffix
            mask += [False] * len(suffix)
        yield Dialogue(ids=ids, mask=mask)


def _train(model: PreTrainedModel, dialogues: list[Dialogue]) -> None:
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - 0.9 * step / NUM_STEPS)
        loss = _loss(model, rng.sample(dialogues, BATCH_SIZE))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _loss(model: PreTrainedModel, batch: list[Dialogue]) -> torch.Tensor:
    """Mean over what the policy writes; logits of nothing else are computed, for they take most of the time."""
    width = max(len(one.ids) for one in batch)
    ids_BL = torch.tensor([one.ids + [0] * (width - len(one.ids)) for one in batch])
    mask_BL = torch.tensor([one.mask + [False] * (width - len(one.mask)) for one in batch])
    hidden_BLD = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    logits_NV = model.get_output_embeddings()(hidden_BLD[mask_BL.roll(-1, dims=1)])
    return torch.nn.functional.cross_entropy(logits_NV, ids_BL[mask_BL], label_smoothing=NOISE)
