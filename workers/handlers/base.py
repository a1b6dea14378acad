"""What a kind of task must provide: INIT calls `init`, RUN `call_tool`, EVAL `eval`. Handlers know no database.

Each call has a time budget (`rollout.*_timeout_s` of the run). When it is used up, or the episode was cancelled,
`init` and `eval` see a StageTimeout raised in the middle of their code, `call_tool` a CancelledError: clear up within
ROLLMILL_STAGE_GRACE_S and let it pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from pydantic import Field, JsonValue, field_validator

from common.episode import Frozen, Message, ToolCall, ToolSpec
from workers.sandbox.protocol import SandboxSession


class Prepared(Frozen):
    """What an episode starts from."""

    messages: tuple[Message, ...]
    """The first prompt's messages."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools the policy is told of; () = none."""
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path -> text, put into the sandbox before the first turn."""
    needs_sandbox: bool = False


class Score(Frozen):
    """What EVAL found."""

    reward: float
    """Finite; what the policy is trained on."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Named components, for people."""

    @field_validator("reward")
    @classmethod
    def _finite(cls, reward: float) -> float:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not finite")
        return reward


class Handler(Protocol):
    """One kind of task. Handlers hold no state between calls: stages run in different processes."""

    name: str
    """Its name in the registry."""

    def tasks(self, *, seed: int, num_tasks: int) -> Iterator[dict[str, JsonValue]]:
        """Make the payloads of a procedural data set; the same arguments give the same payloads."""
        ...

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """What the episode starts from. Raises ValueError for a payload of another shape."""
        ...

    async def call_tool(self, call: ToolCall, payload: dict[str, JsonValue], sandbox: SandboxSession | None) -> str:
        """Run a tool call; the agent's mistakes come back as text ("error: ...", "unknown tool: ...").

        Hundreds of episodes share its event loop: what blocks goes into `asyncio.to_thread`.
        """
        ...

    def eval(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...]) -> Score:
        """Score the whole conversation, first messages included."""
        ...


def unknown_tool(call: ToolCall) -> str:
    """The result of calling a tool that was never offered: the same words whatever the task."""
    return f"unknown tool: {call.name}"


def tool_error(reason: str) -> str:
    """The result of a call that went wrong through the agent's own fault."""
    return f"error: {reason}"


def succeeded(result: Message) -> bool:
    """Whether a tool message reports neither an error nor an unknown tool."""
    return result.role == "tool" and not result.content.startswith(("error: ", "unknown tool: "))
