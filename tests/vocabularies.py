"""The vocabularies of real models, as packages on the test environment's list ship them."""

from __future__ import annotations

import base64
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

SHIPPED = {"qwen": ("qwen_agent", "utils/qwen.tiktoken"), "llama": ("llama_models", "llama3/tokenizer.model")}


def shipped_ranks(name: str, *, num_entries: int | None = None) -> dict[bytes, int]:
    """Bytes of each entry -> its rank; the first `num_entries`, which are a vocabulary too, or all."""
    package, path = SHIPPED[name]
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed: run `make dev`"
    file = Path((spec.submodule_search_locations or [""])[0], path)
    lines = file.read_bytes().splitlines()[:num_entries]
    return {base64.b64decode(entry): int(rank) for entry, rank in map(bytes.split, lines)}


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
