"""The agent loop: prompts made of ids only, turns played until the episode ends. Knows no queue, table or clock.

The prompt of turn k+1 is the prompt of turn k, the ids sampled in it and the ids of the new suffix, unless the handler
or the chat template rewrote the history (prompts.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.config import RolloutConfig
from common.episode import FinishReason, Message, Sampled, ToolCall, ToolSpec, Turn
from common.errors import EpisodeError, RollmillError
from common.outcomes import Outcome
from workers.engine_errors import ContextOverflow
from workers.handlers.base import tool_error, unknown_tool
from workers.prompts import Prompt, conversation, extended, rewritten
from workers.sandbox.protocol import OutOfMemory
from workers.tool_calls import ParsedTurn

logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """What the loop needs of a renderer; `workers.render.Renderer` is one for every model family."""

    keep_thinking: bool
    """True = `rewritten` never gives a prompt."""

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]: ...
    def suffix(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...
    def rewritten(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None: ...
    def parse(self, ids: Sequence[int]) -> ParsedTurn: ...


class OutOfTime(RollmillError):
    """The agent's time budget was used up in the middle of a request or a tool call, which was cut off."""


class _RowFull(RollmillError):
    """The prompt leaves no room for a token in the run's longest training row."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What an engine answered."""

    sampled: Sampled
    engine: str
    """URL of the one that finished it."""
    latency_ms: int
    """Time in requests that gave tokens; waiting for an engine is not the agent's."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """How an episode ended."""

    outcome: Outcome
    last: Turn | None = None
    """The last turn, which is not stored yet: it goes with the move. None = all are stored."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Plays one episode."""

    renderer: Renderer
    config: RolloutConfig
    generate: Callable[[list[int]], Awaitable[Generated]]
    """Prompt ids to sampled ids. Raises ContextOverflow when the prompt is too long, and OutOfTime."""
    call_tool: Callable[[ToolCall], Awaitable[str]]
    """Raises OutOfTime, OutOfMemory: the turn is then the last, with the results that came before."""
    save: Callable[[Turn], Awaitable[None]]
    """Stores a turn; the loop goes on only after it. Not called for the last one."""
    spent_s: Callable[[], float]
    """Time that the agent has used of its budget."""
    compact: Callable[[tuple[Message, ...]], Awaitable[tuple[Message, ...] | None]] | None = None
    """Shortens the conversation before a turn whose prompt is longer than compact_tokens; its None = not this time.
    Raises OutOfTime. None = nobody does."""

    async def play(self, messages: Sequence[Message], tools: Sequence[ToolSpec], stored: Sequence[Turn]) -> Played:
        """Play from the first messages, or go on after the `stored` turns."""
        turns = list(stored)
        last: Turn | None = None
        while (outcome := self._ended(turns)) is None:
            if last is not None:
                await self.save(last)
            try:
                prompt = await self._prompt(messages, tools, turns)
                generated = await self._generate(prompt)
            except (ContextOverflow, _RowFull) as error:
                if not turns:
                    # The task itself is too long: nothing was sampled, so there is nothing to score or train.
                    detail = f"first prompt of {len(prompt.ids)} ids: {error}"
                    raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True) from None
                is_full = isinstance(error, _RowFull)
                return Played(outcome=Outcome.TOKEN_LIMIT if is_full else Outcome.CONTEXT_LIMIT)
            except OutOfTime as error:
                if not turns:
                    # There is nothing to score, and the agent has not even spoken: this says nothing about it.
                    raise EpisodeError(Outcome.STAGE_TIMEOUT, f"no turn: {error}") from None
                return Played(outcome=Outcome.AGENT_TIMEOUT)
            said, cut = await self._respond(generated.sampled, tools, is_last=len(turns) + 1 == self.config.max_turns)
            last = Turn(
                index=len(turns),
                sample=prompt.sample,
                suffix_ids=prompt.suffix_ids,
                compacted=prompt.compacted,
                sampled=generated.sampled,
                messages=said,
                engine=generated.engine,
                latency_ms=generated.latency_ms,
            )
            turns.append(last)
            if cut is not None:
                return Played(outcome=cut, last=last)
        return Played(outcome=outcome, last=last)

    async def _prompt(self, first: Sequence[Message], tools: Sequence[ToolSpec], turns: Sequence[Turn]) -> Prompt:
        if not turns:
            return Prompt(ids=self._first_prompt(first, tools), num_before=0, sample=0)
        prompt = extended(turns, self.renderer.suffix(_results(turns[-1]), after=turns[-1].sampled.ids))
        messages = conversation(first, turns)
        if not self.renderer.keep_thinking:
            # Rendered whole in a thread: hundreds of episodes share this loop.
            shown = await asyncio.to_thread(self.renderer.rewritten, messages, tools)
            prompt = prompt if shown is None else rewritten(turns, shown)
        if self.compact is not None and self.config.needs_compacting(len(prompt.ids)):
            prompt = await self._compacted(messages, tools, turns) or prompt
        if prompt.sample > turns[-1].sample:
            logger.info("history rewritten: a new sample begins turn=%d sample=%d", len(turns), prompt.sample)
        return prompt

    def _first_prompt(self, first: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            return self.renderer.first_prompt(first, tools)
        except ValueError as error:
            # The task's messages and the run's template say so alone.
            detail = f"the first prompt cannot be made: {error}"
            raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True) from error

    async def _compacted(
        self, messages: tuple[Message, ...], tools: Sequence[ToolSpec], turns: Sequence[Turn]
    ) -> Prompt | None:
        assert self.compact is not None
        compacted = await self.compact(messages)
        if compacted is None or compacted == messages:
            return None
        try:
            ids = await asyncio.to_thread(self.renderer.first_prompt, compacted, tools)
        except ValueError as error:
            raise EpisodeError(Outcome.HANDLER_FAILED, f"compact: {error}") from error
        return rewritten(turns, ids, compacted=compacted)

    async def _generate(self, prompt: Prompt) -> Generated:
        if self.config.max_sampled(len(prompt.ids)) < 1:
            raise _RowFull(f"rollout.max_row_tokens is {self.config.max_row_tokens}")
        return await self.generate(prompt.ids)

    def _ended(self, turns: Sequence[Turn]) -> Outcome | None:
        if turns:
            if turns[-1].sampled.finish_reason is not FinishReason.STOP:
                return Outcome.TOKEN_LIMIT
            parsed = self.renderer.parse(turns[-1].sampled.ids)
            if parsed.error is not None and self.config.on_format_error == "end":
                return Outcome.FORMAT_ERROR
            if parsed.error is None and not parsed.tool_calls:
                return Outcome.FINISHED
            if len(turns) < self.config.max_turns and len(_results(turns[-1])) < len(parsed.tool_calls):
                return Outcome.AGENT_TIMEOUT
        if len(turns) == self.config.max_turns:
            return Outcome.TURN_LIMIT
        return Outcome.AGENT_TIMEOUT if self.spent_s() > self.config.episode_timeout_s else None

    async def _respond(
        self, sampled: Sampled, tools: Sequence[ToolSpec], *, is_last: bool
    ) -> tuple[tuple[Message, ...], Outcome | None]:
        """The turn's messages, and how the episode ended in the middle of its tool calls; None = it did not."""
        parsed = self.renderer.parse(sampled.ids)
        said = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        if sampled.finish_reason is not FinishReason.STOP or is_last:
            return (said,), None
        if parsed.error is not None:
            return (said, *self._told(parsed.error)), None
        results: list[Message] = []
        cut = None
        try:
            for call in parsed.tool_calls:
                results.append(Message(role="tool", content=await self._result(call, tools)))
        except (OutOfTime, OutOfMemory) as error:
            logger.info("tool call cut off name=%s: %s", call.name, error)
            cut = Outcome.AGENT_TIMEOUT if isinstance(error, OutOfTime) else Outcome.MEMORY_LIMIT
        return (said, *results), cut

    def _told(self, error: str) -> tuple[Message, ...]:
        if self.config.on_format_error == "end":
            return ()
        return (Message(role="tool", content=tool_error(error)),)

    async def _result(self, call: ToolCall, tools: Sequence[ToolSpec]) -> str:
        # A handler that offers none may still describe some in its own words, and knows their names alone.
        if tools and call.name not in {tool.name for tool in tools}:
            return unknown_tool(call)
        return await self.call_tool(call)


def _results(turn: Turn) -> list[Message]:
    return [message for message in turn.messages if message.role == "tool"]
