"""Messages to ids by a published chat template, a Jinja program by strangers: sandboxed, and the same at any hour."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from common.episode import Message, ToolSpec
from common.errors import SetupError


class ChatTemplate:
    """A chat template with its tokenizer; every render gets the same variables."""

    def __init__(self, name: str, *, tokenizer: Tokenizer, template: str, kwargs: Mapping[str, JsonValue]) -> None:
        """Raises SetupError, naming the model, when the template is not valid."""
        self._name = name
        self._tokenizer = tokenizer
        self._template = _compile(template, name)
        self._kwargs = dict(kwargs)
        self._control_tokens = tuple(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )

    def ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation_prompt: bool) -> list[int]:
        """Ids of the conversation shown whole. Raises ValueError when the template cannot show these messages."""
        try:
            text = self._template.render(
                messages=[self._shown(message) for message in messages],
                # Templates test `if tools`; an empty list must look like no tools at all.
                tools=[{"type": "function", "function": tool.model_dump()} for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"{self._name}: the chat template failed: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _shown(self, message: Message) -> dict[str, JsonValue]:
        content = message.content
        if message.role == "tool":
            # A tool's output must not open or close a turn, whatever an agent's files say.
            for token in self._control_tokens:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        shown: dict[str, JsonValue] = {"role": message.role, "content": content}
        if message.tool_calls:
            shown["tool_calls"] = [{"type": "function", "function": call.model_dump()} for call in message.tool_calls]
        return shown


def _compile(template: str, name: str) -> Template:
    # The settings that published chat templates are written for, but for `strftime_now`, which stays undefined:
    # templates then show their fixed date, and a prompt does not change at midnight.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise SetupError(f"{name}: the chat template is not valid: {error}") from error


def _to_json(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter, plain JSON without HTML escapes: that is what models are trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
