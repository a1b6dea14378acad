"""Reads what a renderer needs of a model folder: the template, the special tokens, the stop ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from tokenizers import Tokenizer

from common.errors import SetupError


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The parts of a model folder that rendering needs."""

    tokenizer: Tokenizer
    template: str
    special_tokens: dict[str, str]
    """The variables that templates expect, such as bos_token -> its text."""
    stop_ids: tuple[int, ...]
    """eos_token_id of generation_config.json and config.json; () = they name none."""


def read_folder(folder: Path) -> ModelFolder:
    """Read tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

    Raises SetupError that names the folder and what it lacks.
    """
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise SetupError(f"{folder} has no tokenizer.json: is it a model folder?")
    config = _read_json(folder / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    _check_rows(folder, tokenizer)
    return ModelFolder(
        tokenizer=tokenizer,
        template=_read_template(folder, config),
        special_tokens=_special_tokens(config),
        stop_ids=_read_stop_ids(folder),
    )


def _check_rows(folder: Path, tokenizer: Tokenizer) -> None:
    """An id without a row in the model's embeddings would end the engine that is sent it."""
    rows = _read_json(folder / "config.json").get("vocab_size")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if isinstance(rows, int) and largest >= rows:
        raise SetupError(f"{folder}: the tokenizer has ids up to {largest}, the model's embeddings {rows} rows")


def _read_json(path: Path) -> dict[str, JsonValue]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SetupError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SetupError(f"{path} is not a JSON object")
    return value


def _read_template(folder: Path, config: Mapping[str, JsonValue]) -> str:
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if not isinstance(template, str):
        raise SetupError(f"{folder} has no chat template, neither chat_template.jinja nor in tokenizer_config.json")
    return template


def _special_tokens(config: Mapping[str, JsonValue]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _read_stop_ids(folder: Path) -> tuple[int, ...]:
    found: list[JsonValue] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int)))
