"""The families with the vocabularies of the real models, as packages ship them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.episode import Message, ToolCall, ToolSpec
from tests.unit.workers.model_families import HYBRID, INSTRUCT, LLAMA, QWEN, THINKING, Published
from tests.vocabularies import byte_model, shipped_ranks
from workers.render import Renderer

TOOL = ToolSpec(
    name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}}
)
CALL = ToolCall(name="look", arguments={"at": "\u5de6 \u00e9"})


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    return HYBRID.dress(byte_model(shipped_ranks("qwen"), ignore_merges=False))


def conversation(published: Published) -> list[Message]:
    thought = "<think>\nweigh it\n</think>\n\n" if published in (HYBRID, THINKING) else ""
    said = Message(role="assistant", content=thought, tool_calls=(CALL,) * (1 if published is LLAMA else 2))
    results = [
        Message(role="tool", content=f"{text} \U0001f469\u200d\U0001f4bb\n") for text in ("\u6f22\u5b57 e\u0301", "x  ")
    ]
    return [
        Message(role="user", content="What is there? 12345"),
        *(said, *results) * 3,
        Message(role="assistant", content=f"{thought}A tree."),
    ]


def check(published: Published, tokenizer: Tokenizer, folder: Path) -> None:
    renderer = Renderer.from_folder(published.write(folder, tokenizer=tokenizer))
    messages = conversation(published)

    segments = renderer.segments(messages, [TOOL])

    assert [segment.sampled for segment in segments] == [False, True] * 4
    shown = [message.tool_calls for message in messages if message.role == "assistant"]
    assert [renderer.parse(segment.ids).tool_calls for segment in segments[1::2]] == shown
    extended = [token for segment in segments[:-1] for token in segment.ids]
    assert renderer.first_prompt(messages[:-1], [TOOL]) == extended


@pytest.mark.parametrize("published", [HYBRID, THINKING, INSTRUCT, QWEN], ids=lambda published: published.name)
def test_qwen(published: Published, qwen: Tokenizer, tmp_path: Path) -> None:
    check(published, qwen, tmp_path)
    # Numbers that these entries have in every Qwen model of these families.
    assert [*qwen.encode("\n").ids, qwen.token_to_id("<|endoftext|>")] == [198, 151_643]


def test_llama(tmp_path: Path) -> None:
    llama = LLAMA.dress(byte_model(shipped_ranks("llama"), ignore_merges=True))
    check(LLAMA, llama, tmp_path)
    assert [*llama.encode("\n\n").ids, llama.token_to_id("<|begin_of_text|>")] == [271, 128_000]
