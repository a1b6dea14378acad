"""Turns messages into token ids and sampled ids into messages; the only module that knows chat templates.

The prompt of turn k+1 is prompt k + the ids sampled in turn k + `suffix`, so sampled text is never tokenised again.
A template for which this would differ from rendering the conversation whole is refused when the renderer is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from common.episode import Message, ToolCall, ToolSpec
from common.errors import SetupError
from workers.tool_calls import ParsedTurn, parse_turn

PROBE_TOOL = ToolSpec(
    name="probe",
    description="Probe.",
    parameters={"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
)
PROBE_PROMPT = (Message(role="user", content="Go."),)
PROBE_THOUGHT = "weigh it"
PROBE_TURNS = (
    Message(
        role="assistant",
        content=f"<think>\n{PROBE_THOUGHT}\n</think>\n\nTwo calls.",
        tool_calls=tuple(ToolCall(name="probe", arguments={"x": text}) for text in ("a", "b")),
    ),
    Message(role="tool", content="first result"),
    Message(role="tool", content="second result\n"),
    Message(role="assistant", content="", tool_calls=(ToolCall(name="probe", arguments={"x": "c"}),)),
    Message(role="tool", content=""),
)
"""Two turns with tools: parallel calls, text beside calls, thinking, empty content, a trailing newline."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a rendered conversation."""

    ids: tuple[int, ...]
    sampled: bool
    """True for what the policy writes, close token included: loss mask 1. All else is given: mask 0."""


class Renderer:
    """Renders with one model folder's tokenizer and chat template. Build it once: the tokenizer takes a while."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        template: str,
        close_token: str,
        extra_stop_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Raises SetupError, naming `name`, when the template cannot be extended turn by turn.

        `template_kwargs` go into every render alike, so that first prompts and suffixes fit each other.
        """
        self._name = name
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._template = _compile(template, name)
        close_id = tokenizer.token_to_id(close_token)
        if close_id is None:
            raise SetupError(f"{name}: eos_token {close_token!r} is not in tokenizer.json")
        self.close_id: int = close_id
        """The token that ends an assistant turn; only after it may a suffix follow."""
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((close_id, *extra_stop_ids)))
        """Ids at which the engine stops a turn, the close token first."""
        self._control_tokens = tuple(
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        )
        try:
            self._prove()
        except ValueError as error:
            raise SetupError(str(error)) from error

    @classmethod
    def from_folder(cls, folder: Path | str, *, template_kwargs: Mapping[str, JsonValue] | None = None) -> Renderer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
        folder = Path(folder)
        tokenizer_path = folder / "tokenizer.json"
        if not tokenizer_path.is_file():
            raise SetupError(f"{folder} has no tokenizer.json: is it a model folder?")
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        if "eos_token" not in special_tokens:
            raise SetupError(f"{folder}/tokenizer_config.json names no eos_token")
        return cls(
            name=str(folder),
            tokenizer=Tokenizer.from_file(str(tokenizer_path)),
            template=_read_template(folder, config),
            close_token=special_tokens["eos_token"],
            extra_stop_ids=_read_stop_ids(folder),
            template_kwargs={**special_tokens, **(template_kwargs or {})},
        )

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the prompt of turn 0, up to and including the header of the assistant's turn.

        Raises ValueError when the template cannot show these messages.
        """
        return self._render(messages, tools, generation_prompt=True)

    def suffix(self, tool_messages: Sequence[Message]) -> list[int]:
        """Ids to append after a sampled turn that ended with `close_id`, to ask for the next turn.

        Holds the template's own separator after the close token, all results of the turn together, and the header
        of the next assistant turn. They are given, not sampled: loss mask 0. Raises ValueError without results or
        for other roles, which may change how a template shows earlier turns.
        """
        if not tool_messages:
            raise ValueError("a suffix needs at least one tool result")
        if roles := {message.role for message in tool_messages} - {"tool"}:
            raise ValueError(f"a suffix takes tool results only, not role {', '.join(sorted(roles))}")
        call = ToolCall(name=PROBE_TOOL.name, arguments={"x": "a"})
        asked = Message(role="assistant", content="", tool_calls=(call,) * len(tool_messages))
        whole = self._render([*PROBE_PROMPT, asked, *tool_messages], [PROBE_TOOL], generation_prompt=True)
        return whole[self._end_of_turn(whole, len(self._probe_prompt_ids)) :]

    def segments(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        """Split the render of a whole conversation into given and sampled pieces, in order.

        The first assistant message begins the sampled part. Raises ValueError where the whole render differs from
        first_prompt + sampled turns + suffixes, naming the first differing id.
        """
        first = next(i for i, message in enumerate(messages) if message.role == "assistant")
        unfinished = messages[-1].role != "assistant"
        whole = self._render(messages, tools, generation_prompt=unfinished)
        given, rest = self.first_prompt(messages[:first], tools), messages[first:]
        segments: list[Segment] = []
        position = 0
        while given:
            self._require_same(whole, given, position)
            segments.append(Segment(ids=tuple(given), sampled=False))
            position += len(given)
            if not rest:
                break
            end = self._end_of_turn(whole, position)
            segments.append(Segment(ids=tuple(whole[position:end]), sampled=True))
            position = end
            results = tuple(takewhile(lambda message: message.role == "tool", rest[1:]))
            rest = rest[1 + len(results) :]
            given = self.suffix(results) if results or rest else []
        if unfinished and len(whole) > position:
            self._refuse(whole, [], position, 0)
        return segments

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """What a sampled turn says; a stop token at its end is not part of the text."""
        end = len(ids) - 1 if ids and ids[-1] in self.stop_ids else len(ids)
        return parse_turn(self.decode(ids[:end]))

    @cached_property
    def _probe_prompt_ids(self) -> list[int]:
        return self.first_prompt(PROBE_PROMPT, [PROBE_TOOL])

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation_prompt: bool) -> list[int]:
        try:
            text = self._template.render(
                messages=[self._for_template(message) for message in messages],
                # Templates test `if tools`; an empty list must look like no tools at all.
                tools=[{"type": "function", "function": tool.model_dump()} for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"{self._name}: the chat template failed: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _for_template(self, message: Message) -> dict[str, JsonValue]:
        content = message.content
        if message.role == "tool":
            # A tool's output must not open or close a turn, whatever an agent's files say.
            for token in self._control_tokens:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        shown: dict[str, JsonValue] = {"role": message.role, "content": content}
        if message.tool_calls:
            shown["tool_calls"] = [{"type": "function", "function": call.model_dump()} for call in message.tool_calls]
        return shown

    def _end_of_turn(self, whole: list[int], start: int) -> int:
        try:
            return whole.index(self.close_id, start) + 1
        except ValueError:
            raise ValueError(
                f"{self._name}: the chat template does not end an assistant turn with "
                f"{self.decode([self.close_id])!r}, the tokenizer's eos_token"
            ) from None

    def _prove(self) -> None:
        segments = self.segments([*PROBE_PROMPT, *PROBE_TURNS], [PROBE_TOOL])
        sampled = [segment for segment in segments if segment.sampled]
        if PROBE_THOUGHT not in self.decode(sampled[0].ids):
            raise ValueError(
                f"{self._name}: the chat template drops the thinking of earlier turns, so a later prompt would not "
                "begin with the ids that were sampled; use a template that keeps it"
            )

    def _require_same(self, whole: list[int], given: list[int], position: int) -> None:
        for offset, expected in enumerate(given):
            if position + offset >= len(whole) or whole[position + offset] != expected:
                self._refuse(whole, given, position + offset, offset)

    def _refuse(self, whole: list[int], given: list[int], position: int, offset: int) -> NoReturn:
        raise ValueError(
            f"{self._name}: the chat template cannot be extended turn by turn: at id {position} the whole render has "
            f"{self._show(whole, position)}, the extended one {self._show(given, offset)}"
        )

    def _show(self, ids: list[int], index: int) -> str:
        return f"{ids[index]} {self.decode(ids[index : index + 1])!r}" if index < len(ids) else "nothing"


def _compile(template: str, name: str) -> Template:
    # The settings that published chat templates are written for.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise SetupError(f"{name}: the chat template is not valid: {error}") from error


def _to_json(value: JsonValue, indent: int | None = None) -> str:
    # Unlike Jinja's own filter, plain JSON without HTML escapes: that is what models are trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


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
    """The variables that templates expect, such as bos_token; each is a text or an object with its content."""
    tokens: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _read_stop_ids(folder: Path) -> list[int]:
    ids = _read_json(folder / "generation_config.json").get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
