"""The agent loop: prompts made of ids only, turns played until the episode ends. Knows no queue, table or clock.

The prompt of turn k+1 is the prompt of turn k, the ids sampled in it and the ids of the new suffix.
"""

from __future__ import annotations

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
from workers.tool_calls import ParsedTurn

logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """What the loop needs of a renderer; `workers.render.Renderer` is one for every model family."""

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]: ...
    def suffix(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]: ...
    def parse(self, ids: Sequence[int]) -> ParsedTurn: ...


class OutOfTime(RollmillError):
    """The agent's time budget was used up in the middle of a request or a tool call, which was cut off."""


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
    """Raises OutOfTime: the turn is then the last, with the results that came before."""
    save: Callable[[Turn], Awaitable[None]]
    """Stores a turn; the loop goes on only after it. Not called for the last one."""
    spent_s: Callable[[], float]
    """Time that the agent has used of its budget."""

    async def play(self, messages: Sequence[Message], tools: Sequence[ToolSpec], stored: Sequence[Turn]) -> Played:
        """Play from the first messages, or go on after the `stored` turns."""
        turns = list(stored)
        last: Turn | None = None
        while (outcome := self._ended(turns)) is None:
            if last is not None:
                await self.save(last)
            suffix = self._suffix(turns[-1]) if turns else self.renderer.first_prompt(messages, tools)
            try:
                generated = await self.generate([*prompt_ids(turns), *suffix])
            except ContextOverflow as error:
                if not turns:
                    # The task itself is too long: nothing was sampled, so there is nothing to score or train.
                    raise EpisodeError(Outcome.HANDLER_FAILED, f"first prompt of {len(suffix)} ids: {error}") from None
                return Played(outcome=Outcome.CONTEXT_LIMIT)
            except OutOfTime as error:
                if not turns:
                    # There is nothing to score, and the agent has not even spoken: this says nothing about it.
                    raise EpisodeError(Outcome.STAGE_TIMEOUT, f"no turn: {error}") from None
                return Played(outcome=Outcome.AGENT_TIMEOUT)
            last = Turn(
                index=len(turns),
                suffix_ids=tuple(suffix),
                sampled=generated.sampled,
                messages=await self._respond(generated.sampled, tools, is_last=len(turns) + 1 == self.config.max_turns),
                engine=generated.engine,
                latency_ms=generated.latency_ms,
            )
            turns.append(last)
        return Played(outcome=outcome, last=last)

    def _suffix(self, turn: Turn) -> list[int]:
        return self.renderer.suffix(_results(turn), after=turn.sampled.ids)

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

    async def _respond(self, sampled: Sampled, tools: Sequence[ToolSpec], *, is_last: bool) -> tuple[Message, ...]:
        parsed = self.renderer.parse(sampled.ids)
        said = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        if sampled.finish_reason is not FinishReason.STOP or is_last:
            return (said,)
        if parsed.error is not None:
            return (said, *self._told(parsed.error))
        results = []
        try:
            for call in parsed.tool_calls:
                results.append(Message(role="tool", content=await self._result(call, tools)))
        except OutOfTime:
            logger.info("tool call cut off name=%s", call.name)
        return (said, *results)

    def _told(self, error: str) -> tuple[Message, ...]:
        if self.config.on_format_error == "end":
            return ()
        return (Message(role="tool", content=tool_error(error)),)

    async def _result(self, call: ToolCall, tools: Sequence[ToolSpec]) -> str:
        # A handler that offers none may still describe some in its own words, and knows their names alone.
        if tools and call.name not in {tool.name for tool in tools}:
            return unknown_tool(call)
        return await self.call_tool(call)


def prompt_ids(turns: Sequence[Turn]) -> list[int]:
    """All ids up to and including the last sampled one: what the engine was sent and what it returned."""
    return [token for turn in turns for token in (*turn.suffix_ids, *turn.sampled.ids)]


def _results(turn: Turn) -> list[Message]:
    return [message for message in turn.messages if message.role == "tool"]
