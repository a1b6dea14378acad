"""Reads an assistant turn in Llama's form: text, or JSON calls with "parameters", with or without <|python_tag|>.

The agent loop runs the calls, as it does those that `workers.tool_calls` reads.
"""

from __future__ import annotations

import json

from common.episode import ToolCall
from workers.tool_calls import END_OF_THINKING, ParsedTurn, json_object, tool_call

PYTHON_TAG = "<|python_tag|>"


def parse_llama_turn(text: str) -> ParsedTurn:
    """Parse the text of one turn, stop token removed. Several calls stand one after the other or behind `;`.

    Without the tag a turn is a call if it is an object that has "name"; other JSON may be the answer itself.
    """
    text = text.replace("\0", "\ufffd")
    thinking, marker, said = text.rpartition(END_OF_THINKING)
    before, tag, body = said.partition(PYTHON_TAG)
    if not tag:
        before, body = "", said.strip()
        if not (body.startswith("{") and '"name"' in body):
            return ParsedTurn(content=text.strip(), tool_calls=(), error=None)
    try:
        calls = tuple(_parse_call(piece) for piece in _split_objects(body.replace(PYTHON_TAG, ";")))
    except ValueError as error:
        return ParsedTurn(content=text, tool_calls=(), error=str(error))
    return ParsedTurn(content=(thinking + marker + before).strip(), tool_calls=calls, error=None)


def _split_objects(body: str) -> list[str]:
    pieces: list[str] = []
    rest = body.strip(" \t\r\n;")
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except RecursionError:
            raise ValueError("tool call is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"tool call is not JSON: {error}") from None
        pieces.append(rest[:end])
        rest = rest[end:].strip(" \t\r\n;")
    if not pieces:
        raise ValueError(f"nothing follows {PYTHON_TAG}")
    return pieces


def _parse_call(piece: str) -> ToolCall:
    call = json_object(piece, "tool call")
    return tool_call(call.get("name"), call.get("parameters", call.get("arguments")))
