"""Reads an assistant turn in the Hermes form: free text and `<tool_call>{json}</tool_call>` blocks.

The agent loop runs the calls; a turn with an error ends its episode or is answered, as the run's configuration says.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import NoReturn

from pydantic import JsonValue, ValidationError

from common.episode import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_OF_THINKING = "</think>"
UNSTORABLE_JSON = re.compile(r"[\ud800-\udfff]|(?<!\\)(?:\\\\)*\\u0000")
"""Half surrogates and NUL: JSON can escape them, but UTF-8 and Postgres cannot hold them."""


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """What a sampled turn says."""

    content: str
    """The text outside the tool calls, thinking included; "" when there is none."""
    tool_calls: tuple[ToolCall, ...]
    """In the order written; () when there are none or `error` is set."""
    error: str | None
    """What is wrong with the turn's form; None = well formed."""


def parse_turn(text: str) -> ParsedTurn:
    """Parse the text of one turn, close token removed. Calls inside thinking are only thoughts."""
    text = text.replace("\0", "\ufffd")
    thinking, marker, said = text.rpartition(END_OF_THINKING)
    pieces: list[str] = []
    calls: list[ToolCall] = []
    try:
        while OPEN in said:
            before, _, said = said.partition(OPEN)
            body, closed, said = said.partition(CLOSE)
            if not closed:
                raise ValueError(f"{OPEN} is not closed")
            pieces.append(before)
            calls.append(parse_call(body))
        pieces.append(said)
        if any(CLOSE in piece for piece in pieces):
            raise ValueError(f"{CLOSE} without {OPEN}")
    except ValueError as error:
        return ParsedTurn(content=text, tool_calls=(), error=str(error))
    return ParsedTurn(content=(thinking + marker + "".join(pieces)).strip(), tool_calls=tuple(calls), error=None)


def parse_call(body: str) -> ToolCall:
    """Parse `{"name": ..., "arguments": {...}}`. Raises ValueError with one line that says what is wrong."""
    call = json_object(body, "tool call")
    return tool_call(call.get("name"), call.get("arguments"))


def tool_call(name: JsonValue, arguments: JsonValue) -> ToolCall:
    """The call of that name; arguments may also be the text of a JSON object. Raises ValueError with one line."""
    if not isinstance(name, str):
        raise ValueError('tool call has no "name"')
    if isinstance(arguments, str):
        arguments = json_object(arguments, f"arguments of {name!r}")
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {name!r} are not a JSON object")
    if UNSTORABLE_JSON.search(json.dumps([name, arguments], ensure_ascii=False)):
        raise ValueError("tool call holds a character that is not text")
    try:
        return ToolCall(name=name, arguments=arguments)
    except ValidationError:
        raise ValueError(f"arguments of {name!r} are nested too deeply") from None


def json_object(text: str, what: str) -> dict[str, JsonValue]:
    """The JSON object that the text is, without NaN and infinities. Raises ValueError that names `what` it is."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value
