"""A task that asks for nothing: one turn, no tools, the same reward. Shows what the pipeline itself costs."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from common.episode import Message, ToolCall
from workers.handlers.base import Prepared, Score, unknown_tool
from workers.sandbox.protocol import SandboxSession


class Noop:
    """The handler `workers.handlers.noop:Noop`."""

    name = "noop"

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Payloads that differ only in their number."""
        for number in range(num_tasks):
            yield {"number": number}

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """One short message."""
        return Prepared(messages=(Message(role="user", content="Go."),))

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """No tool is offered."""
        return unknown_tool(call)

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        """Always 1."""
        return Score(reward=1.0)
