"""What a family of models agrees on and its chat template does not say: how turns end and how calls are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from workers.llama_calls import parse_llama_turn
from workers.tool_calls import ParsedTurn, parse_turn


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model; `Renderer` does the rest with the model's own template."""

    name: str
    marks: tuple[str, ...]
    """Tokens whose presence in a vocabulary tells the family; () = every vocabulary."""
    close_token: str | None
    """With which the template ends an assistant's turn; None = the tokenizer's eos_token."""
    other_ends: tuple[str, ...] = ()
    """Tokens that stand in the close token's place: a suffix may follow them at once."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens at which the engine must stop; a turn that ends so is closed by the suffix."""
    parse: Callable[[str], ParsedTurn] = parse_turn
    """Reads a turn's text, stop token removed."""
    thinks: bool = False
    """A turn that opens `<think>` must close it before it ends or calls tools."""
    parallel_calls: bool = True
    """The template can show several calls in one turn; results of several it can show in any case."""


QWEN3 = Family(
    name="qwen3",
    marks=("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<think>"),
    close_token="<|im_end|>",
    stop_tokens=("<|endoftext|>",),
    thinks=True,
)
"""Thinking, instruct and hybrid models: whether a prompt opens the thinking is read off the template."""
QWEN2_5 = Family(
    name="qwen2.5",
    marks=("<|im_start|>", "<|im_end|>", "<|fim_prefix|>"),
    close_token="<|im_end|>",
    stop_tokens=("<|endoftext|>",),
)
LLAMA3 = Family(
    name="llama3",
    marks=("<|start_header_id|>", "<|eot_id|>"),
    close_token="<|eot_id|>",
    other_ends=("<|eom_id|>",),
    stop_tokens=("<|end_of_text|>",),
    parse=parse_llama_turn,
    parallel_calls=False,
)
"""`<|eom_id|>` ends a turn that waits for a tool; results come in the role ipython."""
CHATML = Family(name="chatml", marks=("<|im_start|>", "<|im_end|>"), close_token="<|im_end|>")
"""Any other ChatML model with Hermes calls, the shipped tiny policies among them."""
GENERIC = Family(name="generic", marks=(), close_token=None)
"""Hermes calls with any template and the tokenizer's own eos_token."""

FAMILIES = (QWEN3, QWEN2_5, LLAMA3, CHATML, GENERIC)
"""In the order in which they are tried."""


def detect_family(tokenizer: Tokenizer) -> Family:
    """The first family all of whose marks are in the vocabulary."""
    return next(family for family in FAMILIES if all(tokenizer.token_to_id(mark) is not None for mark in family.marks))


def family_named(name: str) -> Family:
    """The family of that name. Raises KeyError."""
    return {family.name: family for family in FAMILIES}[name]
