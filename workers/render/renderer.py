"""Renders with a model folder's own template, and proves on start that prompts of ids equal what it would show.

The prompt of turn k+1 is prompt k + the ids sampled in turn k + `suffix`, so sampled text is never tokenised again.
A template for which this would differ from rendering the conversation whole is refused when the renderer is made;
one that drops the thinking of earlier turns need not be, see keep_thinking.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from pydantic import JsonValue
from tokenizers import Tokenizer

from common.episode import Message, ToolSpec
from common.errors import SetupError
from workers.render.families import CHATML, Family, detect_family, family_named
from workers.render.folder import ModelFolder, read_folder
from workers.render.history import Segment, first_difference
from workers.render.probe import PROBE_PROMPT, PROBE_TOOL, probe_call, tool_probe, user_probe
from workers.render.template import ChatTemplate
from workers.tool_calls import END_OF_THINKING, ParsedTurn

logger = logging.getLogger(__name__)

THINKING_OPENER = re.compile(r"<think>\s*(</think>\s*)?")


class Renderer:
    """Renders with one tokenizer and chat template. Build it once: the tokenizer takes a while."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        template: str,
        close_token: str,
        family: Family = CHATML,
        extra_stop_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, JsonValue] | None = None,
        keep_thinking: bool = True,
    ) -> None:
        """Raises SetupError, naming `name`, when the template cannot be extended turn by turn.

        `template_kwargs` go into every render alike, so that first prompts and suffixes fit each other.
        `keep_thinking` leaves the thinking of earlier turns in prompts, as it was sampled, where the template would
        drop it; without it `rewritten` gives the prompt that the template shows there.
        """
        self._name = name
        self._tokenizer = tokenizer
        self._family = family
        self.keep_thinking = keep_thinking
        self._template = ChatTemplate(name, tokenizer=tokenizer, template=template, kwargs=template_kwargs or {})
        close_id = tokenizer.token_to_id(close_token)
        if close_id is None:
            raise SetupError(f"{name}: the close token {close_token!r} is not in the tokenizer's vocabulary")
        self.close_id: int = close_id
        """The token that ends an assistant turn."""
        ends = [close_id, *self._ids_of(family.other_ends)]
        self._ends = frozenset(ends)
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys((*ends, *self._ids_of(family.stop_tokens), *extra_stop_ids))
        )
        """Ids at which the engine stops a turn, the close token first."""
        self._user_refusal: str | None = None
        try:
            self._probe_header, self._opener = self._find_opener()
            self._user_refusal = self._prove()
        except ValueError as error:
            raise SetupError(str(error)) from error

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        family: str | None = None,
        template_kwargs: Mapping[str, JsonValue] | None = None,
        keep_thinking: bool = True,
    ) -> Renderer:
        """Read a model folder; `family` None = told by its vocabulary. Raises SetupError that names the folder."""
        read = read_folder(Path(folder))
        chosen = family_named(family) if family else detect_family(read.tokenizer)
        close_token = chosen.close_token or read.special_tokens.get("eos_token")
        if close_token is None:
            raise SetupError(f"{folder}/tokenizer_config.json names no eos_token")
        return cls(
            name=f"{folder} ({chosen.name})",
            tokenizer=read.tokenizer,
            template=read.template,
            close_token=close_token,
            family=chosen,
            extra_stop_ids=(*read.stop_ids, *_eos_id(read)),
            template_kwargs={**read.special_tokens, **(template_kwargs or {})},
            keep_thinking=keep_thinking,
        )

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the prompt of turn 0, up to and including the header of the assistant's turn.

        Raises ValueError when the template cannot show these messages.
        """
        return self._template.ids(messages, tools, generation_prompt=True)

    def suffix(self, messages: Sequence[Message], *, after: Sequence[int] = ()) -> list[int]:
        """Ids to append after a sampled turn to ask for the next one: given, not sampled, so loss mask 0.

        Holds the template's own separator after the close token, all results of the turn together, and the header
        of the next assistant turn. `after` are the ids sampled in that turn; where they do not end with a token that
        closes a turn (another stop token, a length limit) the suffix begins with the close token. () = they do.
        Raises ValueError without messages, or for roles other than tool and user.
        """
        if not messages:
            raise ValueError("a suffix needs at least one message")
        roles = {message.role for message in messages}
        if others := roles - {"tool", "user"}:
            raise ValueError(f"a suffix takes tool results and user messages, not role {', '.join(sorted(others))}")
        if "user" in roles and self._user_refusal is not None:
            raise ValueError(f"a suffix cannot hold a user message: {self._user_refusal}")
        whole = self._template.ids(
            [*PROBE_PROMPT, self._asking(messages), *messages], [PROBE_TOOL], generation_prompt=True
        )
        end = self._end_of_turn(whole, len(self._probe_header))
        is_closed = not after or after[-1] in self._ends
        return whole[end if is_closed else end - 1 :]

    def rewritten(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """Ids of the whole prompt after `messages`, if the template now shows the history otherwise than it did before.

        As where it drops the last turn's thinking, or that of turns before. None = it only goes on, or keep_thinking.
        Compared is what the template makes of the messages with and without the last turn, as text: that its ids differ
        from those that were sampled is no reason to drop the latter. A history that the template cannot show goes on.
        """
        if self.keep_thinking:
            return None
        last = max(index for index, message in enumerate(messages) if message.role == "assistant")
        try:
            before = self.decode(self._template.ids(messages[:last], tools, generation_prompt=True))
            ids = self._template.ids(messages, tools, generation_prompt=True)
        except ValueError as error:
            logger.warning("history left as it is: %s", error)
            return None
        shown = self.decode(ids)
        turn, _, _ = shown[len(before) :].partition(self.decode([self.close_id]))
        drops_thought = END_OF_THINKING in messages[last].content and END_OF_THINKING not in turn
        return None if shown.startswith(before) and not drops_thought else ids

    def segments(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        """Split the render of a whole conversation into given and sampled pieces, in order.

        The first assistant message begins the sampled part. Raises ValueError where the whole render differs from
        first_prompt + sampled turns + suffixes, naming the first differing id, or drops a turn's thinking. A thinking
        block that the prompt opens is given in every turn, though the template may show it in the last one only.
        """
        first = next(i for i, message in enumerate(messages) if message.role == "assistant")
        unfinished = messages[-1].role != "assistant"
        whole = self._template.ids(messages, tools, generation_prompt=unfinished)
        given, rest = self.first_prompt(messages[:first], tools), messages[first:]
        segments: list[Segment] = []
        position = 0
        while given:
            position += self._num_matching(whole, given, position)
            segments.append(Segment(ids=tuple(given), sampled=False))
            if not rest:
                break
            end = self._end_of_turn(whole, position)
            segments.append(Segment(ids=tuple(whole[position:end]), sampled=True))
            self._require_thinking(rest[0], segments)
            position = end
            results = tuple(takewhile(lambda message: message.role != "assistant", rest[1:]))
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
        text = self.decode(ids[:end])
        begins_thinking = bool(self._opener) and END_OF_THINKING not in self.decode(self._opener)
        if self._family.thinks and END_OF_THINKING not in text and (begins_thinking or "<think>" in text):
            return ParsedTurn(content=text.replace("\0", "\ufffd"), tool_calls=(), error="<think> is not closed")
        return self._family.parse(text)

    def _ids_of(self, tokens: Sequence[str]) -> list[int]:
        return [token_id for token in tokens if (token_id := self._tokenizer.token_to_id(token)) is not None]

    def _asking(self, messages: Sequence[Message]) -> Message:
        """A turn to which `messages` may be the answer; its ids are cut away."""
        num_results = sum(message.role == "tool" for message in messages)
        num_calls = num_results if self._family.parallel_calls else min(num_results, 1)
        return Message(role="assistant", content="" if num_calls else "Done.", tool_calls=probe_call(num_calls))

    def _find_opener(self) -> tuple[list[int], list[int]]:
        """The probe's prompt, split where a thinking block begins that the template shows in no earlier turn."""
        prompt = self.first_prompt(PROBE_PROMPT, [PROBE_TOOL])
        result = Message(role="tool", content="")
        later = self._template.ids(
            [*PROBE_PROMPT, self._asking([result]), result], [PROBE_TOOL], generation_prompt=True
        )
        split = first_difference(prompt, later)
        if split is None or not THINKING_OPENER.fullmatch(self.decode(prompt[split:])):
            return prompt, []
        return prompt[:split], prompt[split:]

    def _end_of_turn(self, whole: list[int], start: int) -> int:
        end = next((i + 1 for i in range(start, len(whole)) if whole[i] in self._ends), None)
        if end is None:
            raise ValueError(
                f"{self._name}: the chat template does not end an assistant turn with {self.decode([self.close_id])!r}"
            )
        return end

    def _prove(self) -> str | None:
        """Compare ids; returns what keeps a user from answering, if anything. Raises ValueError on a difference."""
        self.segments(tool_probe(parallel_calls=self._family.parallel_calls), [PROBE_TOOL])
        try:
            self.segments(user_probe(), [PROBE_TOOL])
        except ValueError as error:
            # Most episodes have no user who answers: no reason to refuse the template.
            return str(error)
        return None

    def _require_thinking(self, said: Message, segments: Sequence[Segment]) -> None:
        shown = self.decode([*segments[-2].ids[-len(self._opener) - 1 :], *segments[-1].ids])
        if END_OF_THINKING in said.content and END_OF_THINKING not in shown:
            raise ValueError(
                f"{self._name}: the chat template drops the thinking of earlier turns, so a later prompt would not "
                "begin with the ids that were sampled"
            )

    def _num_matching(self, whole: list[int], given: list[int], position: int) -> int:
        """How many of the given ids the whole render shows at `position`: all, or all but the thinking opener."""
        offset = first_difference(given, whole[position : position + len(given)])
        if offset is None:
            return len(given)
        num_without_opener = len(given) - len(self._opener)
        if offset < num_without_opener or given[num_without_opener:] != self._opener:
            self._refuse(whole, given, position + offset, offset)
        return num_without_opener

    def _refuse(self, whole: list[int], given: list[int], position: int, offset: int) -> NoReturn:
        raise ValueError(
            f"{self._name}: the chat template cannot be extended turn by turn: at id {position} the whole render has "
            f"{self._show(whole, position)}, the extended one {self._show(given, offset)}"
        )

    def _show(self, ids: list[int], index: int) -> str:
        return f"{ids[index]} {self.decode(ids[index : index + 1])!r}" if index < len(ids) else "nothing"


def _eos_id(read: ModelFolder) -> tuple[int, ...]:
    """Engines stop at the tokenizer's eos_token unasked, whether or not the template ends turns with it."""
    token_id = read.tokenizer.token_to_id(read.special_tokens.get("eos_token", ""))
    return () if token_id is None else (token_id,)
