"""What EVAL needs to judge files: the stored submission, and sandboxes of the node. Made when it is first asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.db import episode_files
from common.db.episodes import Claim
from common.db.session import Database
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.evaluator.judge import Judge, SandboxJudge
from workers.evaluator.submission import Submission
from workers.run_loop import RunLoop
from workers.sandbox.folder import EVALUATION
from workers.sandbox.protocol import Backend, SandboxSpec

SHARE_FOR_TESTS = 0.6
"""Of EVAL's time. Tests that never end must not look like an EVAL that hangs: they are the agent's doing."""


class Judging:
    """The judges of a process: one loop on which their sandboxes live, one backend."""

    def __init__(self, database: Database, backend: Callable[[], Backend]) -> None:
        """`backend` is called once, when a handler first judges files."""
        self._database = database
        self._make_backend = backend
        self._lock = threading.Lock()
        self._loop: RunLoop | None = None
        self._backend: Backend | None = None

    def judge(self, claim: Claim, spec: SandboxSpec) -> Judge:
        """The judge of an episode's files. Raises EpisodeError when RUN handed none over."""
        deadline = time.monotonic() + SHARE_FOR_TESTS * claim.rollout.eval_timeout_s
        with self._database.begin() as conn:
            stored = episode_files.load(conn, claim.episode_id, claim.attempt)
        if stored is None:
            raise EpisodeError(
                Outcome.HANDLER_FAILED,
                f"RUN handed over no files of episode {claim.episode_id}: its fleet's {claim.handler} judges none",
                is_final=True,
            )
        loop, backend = self._opened()
        return SandboxJudge(
            submission=Submission.unpack(stored.content, stored.left_out),
            loop=loop,
            backend=backend,
            # The same for each try, so that a try replaces what a killed one has left.
            handle=backend.handle(claim.episode_id, claim.attempt) + EVALUATION,
            spec=spec.model_copy(update={"files": None}),
            deadline=deadline,
        )

    def close(self) -> None:
        """End the loop, and the sandboxes with it."""
        with self._lock:
            if self._loop is not None:
                self._loop.close()

    def _opened(self) -> tuple[RunLoop, Backend]:
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend()
            if self._loop is None:
                self._loop = RunLoop()
            return self._loop, self._backend
