"""The families with the vocabularies of the real models, as packages ship them."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from common.episode import Message, ToolCall, ToolSpec
from tests.unit.workers.model_families import HYBRID, INSTRUCT, LLAMA, QWEN, THINKING, Published
from workers.render import Renderer

TOOL = ToolSpec(
    name="look", description="Look.", parameters={"type": "object", "properties": {"at": {"type": "string"}}}
)
CALL = ToolCall(name="look", arguments={"at": "\u5de6 \u00e9"})
SHIPPED = {"qwen": ("qwen_agent", "utils/qwen.tiktoken"), "llama": ("llama_models", "llama3/tokenizer.model")}


def shipped_ranks(name: str) -> dict[bytes, int]:
    """Bytes of each entry -> its rank."""
    package, path = SHIPPED[name]
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed: run `make dev`"
    file = Path((spec.submodule_search_locations or [""])[0], path)
    return {base64.b64decode(entry): int(rank) for entry, rank in map(bytes.split, file.read_bytes().splitlines())}


def byte_model(ranks: dict[bytes, int], *, ignore_merges: bool) -> Tokenizer:
    """The same vocabulary as a model of merges: two entries merge where their bytes together are an entry."""
    printable = [i for i in range(256) if 33 <= i <= 126 or 161 <= i <= 172 or 174 <= i <= 255]
    spelling = {i: chr(i) for i in printable}
    spelling |= {i: chr(256 + n) for n, i in enumerate(i for i in range(256) if i not in spelling)}
    assert set(spelling.values()) == set(pre_tokenizers.ByteLevel.alphabet())

    def spell(entry: bytes) -> str:
        return "".join(spelling[byte] for byte in entry)

    merges: list[tuple[str, str]] = []
    for entry in sorted(ranks, key=ranks.__getitem__):
        pairs = [(entry[:i], entry[i:]) for i in range(1, len(entry)) if entry[:i] in ranks and entry[i:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spell(left), spell(right)) for left, right in pairs]
    vocabulary = {spell(entry): rank for entry, rank in ranks.items()}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))


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
