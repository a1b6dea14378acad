"""The records that cross processes, the states of episodes, groups and runs, and the legal moves between them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

MAX_LOGPROB = 1e-3
"""In nats. A log-prob is above 0 only by rounding; what is above this is none, or has the wrong sign."""

MAX_REWARD = 1e6
"""Largest magnitude of a reward. The loss squares rewards: far larger ones overflow, and no step could train them."""


class Stage(StrEnum):
    """A step of an episode's way, with a queue and a fleet of its own."""

    INIT = "init"
    """Prepares the sandbox and the first messages."""
    RUN = "run"
    """Plays the agent's turns against the engine."""
    EVAL = "eval"
    """Scores the transcript."""


class EpisodeState(StrEnum):
    """Where an episode stands. While a stage works on it, the row carries a claim, not another state."""

    NEW = "NEW"
    """Created by the feeder; INIT takes it."""
    READY = "READY"
    """Sandbox and first messages are there; RUN takes it."""
    SAMPLED = "SAMPLED"
    """The agent's turns are stored; EVAL takes it."""
    SCORED = "SCORED"
    """It has a reward. Final."""
    FAILED = "FAILED"
    """Infrastructure failed on every attempt; it has no reward. Final."""
    CANCELLED = "CANCELLED"
    """Somebody stopped it. Final."""


MOVES: Mapping[EpisodeState, frozenset[EpisodeState]] = MappingProxyType(
    {
        EpisodeState.NEW: frozenset({EpisodeState.READY, EpisodeState.FAILED, EpisodeState.CANCELLED}),
        EpisodeState.READY: frozenset(
            {EpisodeState.SAMPLED, EpisodeState.NEW, EpisodeState.FAILED, EpisodeState.CANCELLED}
        ),
        EpisodeState.SAMPLED: frozenset({EpisodeState.SCORED, EpisodeState.FAILED, EpisodeState.CANCELLED}),
        EpisodeState.SCORED: frozenset(),
        EpisodeState.FAILED: frozenset(),
        EpisodeState.CANCELLED: frozenset(),
    }
)
"""Every legal move. READY -> NEW is a new attempt: the sandbox died with its worker."""

TAKES: Mapping[Stage, EpisodeState] = MappingProxyType(
    {Stage.INIT: EpisodeState.NEW, Stage.RUN: EpisodeState.READY, Stage.EVAL: EpisodeState.SAMPLED}
)
"""The state in which a stage takes an episode."""

STAGE_OF: Mapping[EpisodeState, Stage] = MappingProxyType({state: stage for stage, state in TAKES.items()})
"""The stage that an episode in this state waits for; final states are absent."""

FINAL_STATES = frozenset(state for state, targets in MOVES.items() if not targets)


class GroupState(StrEnum):
    """Where a group of sibling episodes stands."""

    OPEN = "OPEN"
    """Some of its episodes are not final."""
    COMPLETE = "COMPLETE"
    """All its episodes are final; the trainer may take it."""
    TAKEN = "TAKEN"
    """It belongs to a training step that is not done."""
    TRAINED = "TRAINED"
    """Its step is done. Final."""
    DROPPED = "DROPPED"
    """It will not be trained; `drop_reason` says why. Final."""
    EVALUATED = "EVALUATED"
    """It was played to evaluate a version, and was never for training. Final."""


class DropReason(StrEnum):
    """Why a group is not trained."""

    STALE = "stale"
    """Its oldest token is older than the staleness bound allows."""
    TOO_FEW = "too_few_samples"
    """Fewer than two episodes have an agent outcome, so there is no baseline."""
    ZERO_VARIANCE = "zero_variance"
    """All its agent-outcome episodes have the same reward, so it has no gradient; another group takes its place."""
    UNEVEN = "uneven"
    """It gives more or fewer rows than rollout.group_size, and a trainer of one's own takes only even groups."""
    STOPPED = "run_stopped"
    """Somebody stopped the run before the group was trained."""


class RunState(StrEnum):
    """Where a training run stands."""

    ACTIVE = "ACTIVE"
    """The feeder keeps its room full."""
    PAUSED = "PAUSED"
    """No new episodes; those in flight finish."""
    FINISHED = "FINISHED"
    """All its versions are trained. Final, unless it is given more of them (`run_control.extend`)."""
    STOPPED = "STOPPED"
    """Somebody stopped it. Final."""


RUN_MOVES: Mapping[RunState, frozenset[RunState]] = MappingProxyType(
    {
        RunState.ACTIVE: frozenset({RunState.PAUSED, RunState.FINISHED, RunState.STOPPED}),
        RunState.PAUSED: frozenset({RunState.ACTIVE, RunState.FINISHED, RunState.STOPPED}),
        RunState.FINISHED: frozenset(),
        RunState.STOPPED: frozenset(),
    }
)
"""Every legal move, but for FINISHED -> ACTIVE with more versions. A paused run finishes too: its last groups may have
been complete when it was paused."""


class EngineState(StrEnum):
    """Where an engine stands for new work."""

    SERVING = "SERVING"
    """Healthy; takes new work once it has a version of the run."""
    DRAINING = "DRAINING"
    """Finishes what it has."""
    QUARANTINED = "QUARANTINED"
    """Weights could not be loaded or health failed; the keeper tries again with back-off."""


class FinishReason(StrEnum):
    """Why the engine stopped a turn (the wire's own words)."""

    STOP = "stop"
    """It sampled a stop token."""
    LENGTH = "length"
    """It reached the token limit."""
    ABORT = "abort"
    """Somebody aborted the request; ids and log-probs up to there are valid."""


class Frozen(BaseModel):
    """Base of the records that are stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolSpec(Frozen):
    """A tool as the policy is told of it."""

    name: str
    description: str
    parameters: dict[str, JsonValue]
    """JSON schema of the arguments."""


class ToolCall(Frozen):
    """A tool call as parsed from a sampled turn."""

    name: str
    arguments: dict[str, JsonValue]


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Message(Frozen):
    """One message of the conversation, for people and handlers. Training never reads it: it reads ids."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    """Characters that neither UTF-8 nor Postgres can hold (NUL, half surrogates) are replaced by U+FFFD."""
    tool_calls: tuple[ToolCall, ...] = ()

    @field_validator("content")
    @classmethod
    def _is_storable(cls, content: str) -> str:
        return _UNSTORABLE.sub("\ufffd", content)


class VersionSpan(Frozen):
    """Tokens [start, end) of a turn's sampled ids were sampled by this policy version."""

    version: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int = Field(gt=0)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What the engine sampled in one request, exactly."""

    ids: tuple[int, ...]
    """[T] sampled token ids, the stop token included."""
    logprobs: tuple[float, ...]
    """[T] log-probability of each id under the sampling distribution, in nats."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, T) without gap, in order."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} sampled ids but {len(self.logprobs)} log-probs")
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise ValueError(f"version span {span.start}..{span.end} does not continue at {position}")
            position = span.end
        if position != len(self.ids):
            raise ValueError(f"version spans cover {position} of {len(self.ids)} sampled ids")

    @property
    def digest(self) -> bytes:
        """sha256 of the ids and log-probs as stored; what the trainer must arrive at again."""
        return sampled_digest(ids_to_bytes(self.ids), logprobs_to_bytes(self.logprobs))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model call: what was appended to the prompt since the last turn, and what came back."""

    index: int
    """0, 1, 2 … within the attempt."""
    sample: int = 0
    """The training row it belongs to: 0, and one more with each prompt that does not go on from all ids before."""
    suffix_ids: tuple[int, ...]
    """[S] ids appended to the prompt before this turn (where a sample begins: the whole prompt). Loss mask 0."""
    compacted: tuple[Message, ...] | None = None
    """What the handler left of the conversation before this turn; None = all of it."""
    sampled: Sampled
    messages: tuple[Message, ...]
    """The assistant's message and the tool results that followed it."""
    engine: str
    """URL of the engine."""
    latency_ms: int
    """From request to response, in milliseconds."""

    def __post_init__(self) -> None:
        if not self.suffix_ids or not self.sampled.ids:
            raise ValueError(
                f"turn {self.index} has {len(self.suffix_ids)} given and {len(self.sampled.ids)} sampled ids: "
                "both must be there, or it could not be told from its neighbours in training"
            )


@dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """A turn as the trainer reads it."""

    sample: int = 0
    """The training row of the episode that it belongs to."""
    suffix_ids: np.ndarray
    """[S] int32; loss mask 0."""
    sampled_ids: np.ndarray
    """[T] int32; loss mask 1."""
    logprobs: np.ndarray
    """[T] float32, behaviour log-probs in nats."""
    versions: np.ndarray
    """[T] int32, policy version of each sampled id."""

    def __post_init__(self) -> None:
        lengths = {len(self.sampled_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"{len(self.sampled_ids)} ids, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
            )


@dataclass(frozen=True, kw_only=True)
class ScoredEpisode:
    """A final episode of a group, with its tokens."""

    episode_id: int
    group_id: int
    outcome: str
    reward: float
    turns: tuple[TurnTokens, ...]


def ids_to_bytes(ids: tuple[int, ...] | np.ndarray) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def logprobs_to_bytes(logprobs: tuple[float, ...] | np.ndarray) -> bytes:
    """Log-probs as little-endian float32."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def sampled_digest(ids: bytes, logprobs: bytes) -> bytes:
    """sha256 over one turn's sampled ids and log-probs."""
    return hashlib.sha256(ids + logprobs).digest()


def episode_digest(turn_digests: list[bytes]) -> bytes:
    """sha256 over the digests of an episode's turns, in order."""
    return hashlib.sha256(b"".join(turn_digests)).digest()
