"""An agent that hands in files, and a judge of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.unit.workers.sandbox.conftest import HANDLE
from workers.evaluator.collecting import collect
from workers.evaluator.judge import SandboxJudge
from workers.evaluator.submission import FileRules, Submission
from workers.evaluator.suite import Report, Test
from workers.run_loop import RunLoop
from workers.sandbox.folder import EVALUATION
from workers.sandbox.protocol import OPEN, Backend

RULES = FileRules(wanted=("**/*.py",), file_bytes=100_000, total_bytes=200_000, num_files=20)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An agent's sandbox, what it hands in, and a judge of it."""

    backend: Backend
    loop: RunLoop

    async def handed_in(
        self, command: str = "true", *, files: Mapping[str, str] | None = None, rules: FileRules = RULES
    ) -> Submission:
        """What the agent hands in that has these files, after its command. All of them are its own doing."""
        await asyncio.to_thread(self.backend.create, HANDLE, files or {})
        session = self.backend.attach(HANDLE)
        try:
            result = await session.exec(command, timeout_s=60)
            assert (result.timed_out, result.limit) == (False, None), result
            return await collect(session, rules)
        finally:
            await session.close()

    def judge(self, submission: Submission) -> SandboxJudge:
        """EVAL's, with two minutes for all tests."""
        return SandboxJudge(
            submission=submission,
            loop=self.loop,
            backend=self.backend,
            handle=HANDLE + EVALUATION,
            spec=self.backend.choose(OPEN),
            deadline=time.monotonic() + 120,
        )

    async def report(
        self,
        submission: Submission,
        tests: Sequence[Test],
        *,
        files: Mapping[str, str] | None = None,
        timeout_s: float = 30,
    ) -> Report:
        """What EVAL finds."""
        return await asyncio.to_thread(self.judge(submission).run, tests, files=files, timeout_s=timeout_s)
