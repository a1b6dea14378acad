"""What a kind of task must provide: INIT calls `init`, RUN `call_tool`, EVAL `eval`. Handlers know no database.

Each call has a time budget (`rollout.*_timeout_s` of the run). When it is used up, or the episode was cancelled,
`init` and `eval` see a StageTimeout raised in the middle of their code, `call_tool` a CancelledError: clear up within
ROLLMILL_STAGE_GRACE_S and let it pass.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, TypeVar, runtime_checkable

from pydantic import Field, JsonValue

from common.config_network import NetworkConfig
from common.episode import MAX_REWARD, Frozen, Message, ToolCall, ToolSpec
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.evaluator.judge import Judge
from workers.evaluator.submission import FileRules
from workers.sandbox.protocol import SandboxSession

T = TypeVar("T")


class Prepared(Frozen):
    """What an episode starts from."""

    messages: tuple[Message, ...]
    """The first prompt's messages."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools the policy is told of; () = none."""
    files: dict[str, str] = Field(default_factory=dict)
    """Relative path -> text, put into the sandbox before the first turn."""
    needs_sandbox: bool = False
    image: str | None = None
    """Image of Docker or Podman that the task's sandbox needs, with bash and python3; None = the run's choice."""
    network: NetworkConfig | None = None
    """What the task's commands reach; private addresses only as far as the run allows them. None = the run's choice."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What EVAL found. Raises ValueError that names the field and the value if one is not a number as it must be.

    Whatever can be a float is a number: bool, int, a numpy scalar.
    """

    reward: float
    """What the policy is trained on: finite, of magnitude <= MAX_REWARD."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, for people; each bounded like the reward."""
    tampered: bool = False
    """The agent tampered with its tests: that becomes the episode's outcome, and the reward can't be above 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _bounded(self.reward, "reward"))
        if self.tampered and self.reward > 0:
            raise ValueError(
                f"Score: an agent that tampered with its tests gets no reward above 0, got {self.reward:g}"
            )
        if not isinstance(self.parts, Mapping):
            raise ValueError(f"Score: parts must map names to numbers, got {reprlib.repr(self.parts)}")
        for name in self.parts:
            # Postgres stores neither zero bytes nor lone surrogates.
            if not isinstance(name, str) or "\0" in name or _has_surrogate(name):
                raise ValueError(f"Score: a name in parts must be plain text, got {reprlib.repr(name)}")
        parts = {name: _bounded(value, f"parts[{name!r}]") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


def _bounded(value: object, field_name: str) -> float:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        limits = f"a finite number from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}"
        raise ValueError(f"Score: {field_name} must be {limits}, got {reprlib.repr(value)}")
    return number


def _has_surrogate(name: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in name)


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


@runtime_checkable
class Compacts(Protocol):
    """What a handler has besides, if it shortens conversations that outgrow `rollout.compact_tokens` of the run."""

    async def compact(self, messages: tuple[Message, ...], payload: dict[str, JsonValue]) -> Sequence[Message] | None:
        """The conversation that the policy is to see from now on; None = leave it.

        Called before a turn, with all that stands before it: the first messages, or what an earlier call left, and the
        turns and results since. The last message must be one that the policy answers. The scorer sees the whole
        conversation all the same, and each turn stays trained behind the ids it was sampled behind.
        """
        ...


@runtime_checkable
class JudgesFiles(Protocol):
    """What a handler has instead of `eval`, if files that the agent wrote are scored.

    RUN copies them out of the sandbox when the agent has stopped, and ends the sandbox; EVAL, maybe on another node,
    tests them in a fresh one of the same kind and image.
    """

    def submits(self, payload: dict[str, JsonValue]) -> FileRules:
        """Which files of the sandbox are the agent's answer."""
        ...

    def judge(self, payload: dict[str, JsonValue], transcript: tuple[Message, ...], judge: Judge) -> Score:
        """Score the files, `judge.submission`, by tests that the agent has never seen: `judge.run(...)`."""
        ...


def compacted_messages(value: object, handler: str) -> tuple[Message, ...] | None:
    """What a handler's `compact` returned. Raises EpisodeError that says what is wrong with it."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(message, Message) for message in value):
        detail = f"compact of {handler} must return messages or None, got {reprlib.repr(value)}"
        raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True)
    if not value or value[-1].role not in ("user", "tool"):
        last = f"one of role {value[-1].role}" if value else "nothing"
        detail = f"compact of {handler} must end with a message of role user or tool, it ends with {last}"
        raise EpisodeError(Outcome.HANDLER_FAILED, detail)
    return tuple(value)


def returned(value: object, kind: type[T], what: str) -> T:
    """The value, if a handler's call returned what it must. Raises EpisodeError that names the call and both types."""
    if not isinstance(value, kind):
        detail = f"{what} must return {kind.__name__}, got {type(value).__name__}"
        raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True)
    return value


def unknown_tool(call: ToolCall) -> str:
    """The result of calling a tool that was never offered: the same words whatever the task."""
    return f"unknown tool: {call.name}"


def tool_error(reason: str) -> str:
    """The result of a call that went wrong through the agent's own fault."""
    return f"error: {reason}"


def succeeded(result: Message) -> bool:
    """Whether a tool message reports neither an error nor an unknown tool."""
    return result.role == "tool" and not result.content.startswith(("error: ", "unknown tool: "))
