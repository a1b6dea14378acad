"""How an episode ended, each with a sentence. Agent outcomes are data; infrastructure outcomes are never trained."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Why an episode ended. Stored in `episode.outcome`."""

    FINISHED = "finished"
    """The agent gave a final answer."""
    TURN_LIMIT = "turn_limit"
    """The agent used all its turns without a final answer."""
    TOKEN_LIMIT = "token_limit"
    """A turn reached its token limit before the agent closed it, or the training row has no room for another."""
    CONTEXT_LIMIT = "context_limit"
    """The next prompt would not fit the policy's context; the turns so far are kept."""
    FORMAT_ERROR = "format_error"
    """The agent's turn could not be parsed (an unclosed or invalid tool call)."""
    MEMORY_LIMIT = "memory_limit"
    """The agent's commands used so much memory that its sandbox ended, server and all; it is scored with what it has.
    (A command that is stopped for its memory alone is a tool result, and the episode goes on.)"""
    AGENT_TIMEOUT = "agent_timeout"
    """The episode used up its time budget in RUN; it is scored with what it has."""
    TAMPERED = "tampered"
    """EVAL found that the agent made tests pass which can't: a reward of 0, whatever RUN's outcome was."""

    SANDBOX_FAILED = "sandbox_failed"
    """The sandbox could not be made, or died under the agent."""
    SANDBOX_EXPIRED = "sandbox_expired"
    """The sandbox had reached its lifetime (sandbox.lifetime_s) before the episode was played."""
    ENGINE_LOST = "engine_lost"
    """No engine answered within the deadline."""
    CAPTURE_INCOMPLETE = "capture_incomplete"
    """The engine returned ids without log-probs or versions: nothing that could be trained."""
    HANDLER_FAILED = "handler_failed"
    """The task's handler raised an error."""
    LEASE_LOST = "lease_lost"
    """Workers died or stalled under the episode on every attempt."""
    NODE_LOST = "node_lost"
    """The node where its sandbox lies is gone: no RUN fleet has lived there for too long."""
    STAGE_TIMEOUT = "stage_timeout"
    """The stage's work did not end within its budget."""

    @property
    def is_agent(self) -> bool:
        """True when the outcome says something about the policy and may enter a baseline or a loss."""
        return self in AGENT_OUTCOMES

    @property
    def is_lasting(self) -> bool:
        """True when it comes again until somebody mends the cause; other failures of infrastructure may pass."""
        return self is Outcome.HANDLER_FAILED


AGENT_OUTCOMES = frozenset(
    {
        Outcome.FINISHED,
        Outcome.TURN_LIMIT,
        Outcome.TOKEN_LIMIT,
        Outcome.CONTEXT_LIMIT,
        Outcome.FORMAT_ERROR,
        Outcome.AGENT_TIMEOUT,
        Outcome.MEMORY_LIMIT,
        Outcome.TAMPERED,
    }
)
