"""INIT: prepares an episode's first messages, tools and sandbox. RUN takes it from there."""

from __future__ import annotations

from collections.abc import Callable

from common.config_network import NetworkConfig
from common.db import sandboxes
from common.db.episodes import Claim
from common.db.session import Database
from common.episode import EpisodeState, Frozen, Message, ToolSpec
from common.errors import EpisodeError, LeaseLost, boundary
from common.outcomes import Outcome
from workers.handlers.base import Handler, Prepared, returned
from workers.sandbox.protocol import OPEN, Backend, SandboxSpec
from workers.stage import Done


class PreparedEpisode(Frozen):
    """INIT's result, stored in `episode.prepared`."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sandbox: str | None
    """The sandbox's handle; None = the handler's tools need none."""
    spec: SandboxSpec = OPEN
    """Which sandbox it is."""


class Init:
    """The stage's function and what it needs."""

    def __init__(self, database: Database, *, handler: Callable[[str], Handler], backend: Backend, node: str) -> None:
        """`node` is this process's: where its sandboxes lie."""
        self._database = database
        self._handler = handler
        self._backend = backend
        self._node = node

    def __call__(self, claim: Claim) -> Done:
        made = self._handler(claim.handler).init(claim.payload)
        prepared = returned(made, Prepared, f"init of handler {claim.handler}")
        sandbox, spec = self._make_sandbox(claim, prepared) if prepared.needs_sandbox else (None, OPEN)
        stored = PreparedEpisode(messages=prepared.messages, tools=prepared.tools, sandbox=sandbox, spec=spec)
        return Done(
            to=EpisodeState.READY,
            why="prepared",
            prepared=stored.model_dump(mode="json"),
            node=None if sandbox is None or spec.endpoint is not None else self._node,
        )

    def _make_sandbox(self, claim: Claim, prepared: Prepared) -> tuple[str, SandboxSpec]:
        handle = self._backend.handle(claim.episode_id, claim.attempt)
        wanted = claim.config.sandbox
        asked = SandboxSpec(
            kind=wanted.kind,
            image=prepared.image or wanted.image,
            network=_network(prepared.network, wanted.network),
            lifetime_s=wanted.lifetime_s,
        )
        spec = self._backend.choose(asked)
        if spec.endpoint is not None:
            # Nothing lies anywhere before RUN starts it, and notes it then.
            with boundary(Outcome.SANDBOX_FAILED, f"sandbox {handle}"):
                self._backend.create(handle, prepared.files, spec)
            return handle, spec.model_copy(update={"files": dict(prepared.files)})
        with self._database.begin() as conn:
            sandboxes.record(conn, claim, backend=str(spec.kind), node=self._node, handle=handle)
        with boundary(Outcome.SANDBOX_FAILED, f"sandbox {handle}"):
            self._backend.create(handle, prepared.files, spec)
        self._see_that_it_is_wanted(claim, handle)
        return handle, spec

    def _see_that_it_is_wanted(self, claim: Claim, handle: str) -> None:
        """Remove a sandbox whose episode ended while it was made: the reaper may have swept before it was there."""
        try:
            with self._database.begin() as conn:
                sandboxes.check_claim(conn, claim)
        except LeaseLost:
            self._backend.destroy(handle)
            raise


def _network(of_task: NetworkConfig | None, of_run: NetworkConfig) -> NetworkConfig:
    """The task's say first. Raises EpisodeError where it would open what only the run's operator may."""
    if of_task is None:
        return of_run
    beyond = of_task.private_beyond(of_run)
    if beyond:
        raise EpisodeError(
            Outcome.HANDLER_FAILED,
            f"the task's network allows {', '.join(beyond)}: private addresses must be in [sandbox.network] allow of "
            "the run, too",
            is_final=True,
        )
    return of_task
