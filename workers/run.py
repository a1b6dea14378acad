"""RUN: plays an episode's turns against an engine, on the process's one asyncio loop, storing each turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from common.config import RunConfig
from common.db import episode_files, sandboxes, turns
from common.db.episodes import Claim
from common.db.session import Database
from common.episode import EpisodeState, Message, ToolCall, Turn
from common.errors import EpisodeError, boundary
from common.outcomes import Outcome
from workers.agent import Agent, Generated, OutOfTime, Renderer
from workers.evaluator.collecting import collect
from workers.evaluator.submission import FileRules, Submission
from workers.handlers.base import Compacts, Handler, JudgesFiles, compacted_messages, returned
from workers.init import PreparedEpisode
from workers.sandbox.protocol import Backend, SandboxSession
from workers.stage import Done

T = TypeVar("T")


class Engines(Protocol):
    """Where turns are sampled; `workers.engine_pool.EnginePool` is one."""

    async def generate(
        self,
        claim: Claim,
        prompt_ids: list[int],
        *,
        request_id: str,
        stop_ids: tuple[int, ...],
        limit_s: float,
    ) -> Generated: ...


class RunRenderer(Renderer, Protocol):
    """A renderer that also says where a turn stops."""

    stop_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The stage's function and what it needs."""

    database: Database
    engines: Engines
    handler: Callable[[str], Handler]
    """Handler by name."""
    renderer: Callable[[RunConfig], RunRenderer]
    """Renderer of a run's model."""
    backend: Backend
    node: str
    """This process's: sandboxes that lay nowhere before lie there now."""

    async def __call__(self, claim: Claim) -> Done:
        prepared = PreparedEpisode.model_validate(claim.prepared)
        stored = await asyncio.to_thread(self._load, claim) if claim.num_turns else []
        if prepared.sandbox is not None and prepared.spec.endpoint is not None:
            await asyncio.to_thread(self._record, claim, prepared.sandbox)
        playing = _Playing(self, claim, prepared, spent_s=sum(turn.latency_ms for turn in stored) / 1000)
        agent = Agent(
            renderer=playing.renderer,
            config=claim.rollout,
            generate=playing.generate,
            call_tool=playing.call_tool,
            save=playing.save,
            spent_s=lambda: playing.spent_s,
            compact=playing.compact,
        )
        try:
            played = await agent.play(prepared.messages, prepared.tools, stored)
            await playing.hand_over()
        finally:
            await playing.close()
        return Done(to=EpisodeState.SAMPLED, why=played.outcome, outcome=played.outcome, last_turn=played.last)

    def _record(self, claim: Claim, handle: str) -> None:
        with self.database.begin() as conn:
            sandboxes.record(conn, claim, backend="docker", node=self.node, handle=handle)

    def _load(self, claim: Claim) -> list[Turn]:
        with self.database.begin() as conn:
            return turns.load(conn, claim.episode_id, claim.attempt)


class _Playing:
    """One claim's way to the engine, the tools and the database."""

    def __init__(self, stage: Run, claim: Claim, prepared: PreparedEpisode, *, spent_s: float) -> None:
        self._stage = stage
        self._claim = claim
        self._handler = stage.handler(claim.handler)
        self._num_requests = 0
        self._sandbox: SandboxSession | None = None
        if prepared.sandbox is None and isinstance(self._handler, JudgesFiles):
            detail = f"handler {claim.handler} judges files, and its init prepares no sandbox: set needs_sandbox"
            raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True)
        if prepared.sandbox is not None:
            with boundary(Outcome.SANDBOX_FAILED, f"sandbox {prepared.sandbox}"):
                self._sandbox = stage.backend.attach(prepared.sandbox, prepared.spec)
        self.renderer = stage.renderer(claim.config)
        self.spent_s = spent_s
        """Time in requests and tools; waiting for an engine is not the agent's."""

    async def hand_over(self) -> None:
        """Store what the agent hands in, where the handler judges files: nothing of the agent runs any more."""
        if not isinstance(self._handler, JudgesFiles):
            return
        with boundary(Outcome.HANDLER_FAILED, f"submits of {self._claim.handler}"):
            rules = returned(self._handler.submits(self._claim.payload), FileRules, "submits")
        assert self._sandbox is not None, "without one nothing is played"
        handed = await collect(self._sandbox, rules)
        await asyncio.to_thread(self._save_files, handed)

    def _save_files(self, handed: Submission) -> None:
        with self._stage.database.begin() as conn:
            episode_files.save(
                conn,
                self._claim,
                content=handed.pack(),
                num_files=len(handed.files),
                left_out=handed.left_out,
            )

    async def close(self) -> None:
        """End the sandbox's processes; the reaper removes what lies on disk."""
        if self._sandbox is not None:
            await self._sandbox.close()

    async def generate(self, prompt_ids: list[int]) -> Generated:
        self._num_requests += 1
        generated = await self._stage.engines.generate(
            self._claim,
            prompt_ids,
            request_id=f"{self._claim.token}-{self._num_requests}",
            stop_ids=self.renderer.stop_ids,
            limit_s=self._left_s,
        )
        self.spent_s += generated.latency_ms / 1000
        return generated

    async def call_tool(self, call: ToolCall) -> str:
        calling = self._handler.call_tool(call, self._claim.payload, self._sandbox)
        answer: object = await self._in_time(calling, f"tool {call.name}")
        if not isinstance(answer, str):
            detail = f"call_tool of {self._claim.handler} must return text, for {call.name} it gave {answer!r:.80}"
            raise EpisodeError(Outcome.HANDLER_FAILED, detail)
        return answer

    async def compact(self, messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
        if not isinstance(self._handler, Compacts):
            detail = f"rollout.compact_tokens is set, but handler {self._claim.handler} has no method compact"
            raise EpisodeError(Outcome.HANDLER_FAILED, detail, is_final=True)
        left: object = await self._in_time(self._handler.compact(messages, self._claim.payload), "compact")
        return compacted_messages(left, self._claim.handler)

    async def _in_time(self, calling: Awaitable[T], what: str) -> T:
        """Await a handler's call within the agent's time. Raises OutOfTime when it was cut off."""
        started = time.monotonic()
        limit = asyncio.timeout(self._left_s)
        try:
            async with limit:
                return await calling
        except TimeoutError:
            if limit.expired():
                raise OutOfTime(f"{what} was cut off after {self._left_s:g} s") from None
            raise
        finally:
            self.spent_s += time.monotonic() - started

    @property
    def _left_s(self) -> float:
        return self._claim.rollout.episode_timeout_s - self.spent_s

    async def save(self, turn: Turn) -> None:
        await asyncio.to_thread(self._save, turn)

    def _save(self, turn: Turn) -> None:
        with self._stage.database.autocommit() as conn:
            turns.save(conn, self._claim, turn)
