"""EVAL's sandbox: a fresh one in which an agent's files are tested, each test in a folder and a process of its own.

The agent's files lie in `agent`, the tests' own in `tests`. Whatever runs is ended before the next test begins, whose
folder has a name that nobody could know. Handlers get a `Judge`; its report becomes a `Score`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from workers.evaluator import runner
from workers.evaluator.cases import Case, cases_of
from workers.evaluator.submission import Submission, is_plain
from workers.evaluator.suite import (
    Call,
    Fault,
    InProcess,
    Program,
    Report,
    Result,
    Test,
    same,
)
from workers.run_loop import RunLoop
from workers.sandbox.client import result_of
from workers.sandbox.protocol import Backend, ExecResult, Limits, SandboxSession, SandboxSpec, ServerCall

T = TypeVar("T")

PUT_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.1
"""How soon work that was told to stop sees it."""
END_S = 10.0
"""How long the sandbox's end may take then."""
MAX_PART_BYTES = 255
"""Of a name in a folder: more no usual file system takes."""


class Judge(Protocol):
    """What a handler's `judge` is given."""

    @property
    def submission(self) -> Submission:
        """What the agent handed in."""
        ...

    def run(self, tests: Sequence[Test], *, files: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> Report:
        """Test the agent's files in a fresh sandbox. Blocks.

        `files`: the tests' own, relative path -> text; they win over the agent's. `timeout_s`: of one test. Tests for
        which EVAL has no time left fail. Raises EpisodeError when the sandbox fails, and ValueError for tests that no
        solution could pass: none at all, a program that is not there, an expected value beyond the limits.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SandboxJudge:
    """A `Judge` that makes its sandboxes with a backend."""

    submission: Submission
    loop: RunLoop
    """Sandboxes live as long as its thread at most."""
    backend: Backend
    handle: str
    spec: SandboxSpec
    """As of the agent's sandbox."""
    deadline: float
    """By time.monotonic: tests that would begin later fail."""
    limits: Limits = field(default_factory=Limits)

    def run(self, tests: Sequence[Test], *, files: Mapping[str, str] | None = None, timeout_s: float = 10.0) -> Report:
        own = {name: text.encode() for name, text in (files or {}).items()}
        _check_names(own)
        cases = cases_of(tests, self.limits)
        return self._wait(self._run(cases, _placed(self.submission.files, own), timeout_s))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for: the loop, in short steps, between which EVAL can be interrupted."""
        work = self.loop.work(coroutine)
        try:
            while not wait([work], LOOK_EVERY_S).done:
                pass
        finally:
            if work.cancel():
                wait([work], END_S)
        return work.result()

    async def _run(self, cases: Sequence[Case], files: Mapping[str, str], timeout_s: float) -> Report:
        results: dict[str, Result] = {}
        await asyncio.to_thread(self.backend.create, self.handle, {}, self.spec)
        try:
            session = self.backend.attach(self.handle, self.spec)
            try:
                # In an order that code under test can't know.
                for case in secrets.SystemRandom().sample(cases, len(cases)):
                    results[case.name] = await self._result(session, case, files, timeout_s)
            finally:
                await session.close()
        finally:
            await asyncio.to_thread(self.backend.destroy, self.handle)
        return Report(
            results=tuple(results[case.name] for case in cases if not case.is_canary),
            passed_canaries=tuple(c.name for c in cases if c.is_canary and results[c.name].fault is None),
        )

    async def _result(self, session: SandboxSession, case: Case, files: Mapping[str, str], timeout_s: float) -> Result:
        left_s = min(timeout_s, self.deadline - time.monotonic())
        if left_s <= 0:
            return Result(name=case.name, fault=Fault.TIME, detail="there was no time left for it")
        folder = secrets.token_hex(16)
        given = {"folder": folder, "folders": ["agent", "tests", "home"], "files": files}
        header, _ = await session.call(self._call("put", given, PUT_TIMEOUT_S))
        if header.get("error") is not None:
            # A disk that earlier tests filled, a folder that they closed.
            return Result(name=case.name, fault=Fault.LIMIT, detail=f"its files: {header['error']!s:.100}")
        if isinstance(case.test, Program):
            done = await self._start(session, folder, case.test.argv, case.test.input, left_s, joins_errors=False)
            fault, detail = _program_fault(case.test, done)
            return Result(name=case.name, fault=fault, detail=detail)
        nonce = secrets.token_hex(16)
        told = json.dumps({**case.given, "nonce": nonce, "path": ["../tests", "."]})
        argv = ("python3", "-I", "-B", "-c", _runner())
        done = await self._start(session, folder, argv, told, left_s, joins_errors=True)
        fault, detail = _fault(case.test, done, nonce)
        return Result(name=case.name, fault=fault, detail=detail)

    async def _start(
        self,
        session: SandboxSession,
        folder: str,
        argv: Sequence[str],
        told: str,
        timeout_s: float,
        *,
        joins_errors: bool,
    ) -> ExecResult:
        given = {
            "cwd": f"{folder}/agent",
            "home": f"{folder}/home",
            "argv": list(argv),
            "input": base64.b64encode(told.encode()).decode(),
            "joins_errors": joins_errors,
            "timeout_s": timeout_s,
            "kept_bytes": self.limits.kept_bytes,
            "written_bytes": self.limits.written_bytes,
        }
        header, output = await session.call(self._call("start", given, timeout_s))
        if header.get("missing") is not None:
            # Looked for where no agent can write.
            raise ValueError(f"the sandbox has no program {argv[0]!r:.200}, with which a test begins")
        return result_of(header, output)

    def _call(self, name: str, given: Mapping[str, object], timeout_s: float) -> ServerCall:
        return ServerCall(
            name=name,
            given=given,
            timeout_s=timeout_s,
            most_bytes=self.limits.kept_bytes,
        )


def _check_names(own: Collection[str]) -> None:
    """Raises ValueError for the tests' own files that can't be made."""
    for name in own:
        if not is_plain(name) or any(len(part.encode()) > MAX_PART_BYTES for part in name.split("/")):
            raise ValueError(f"file name {name!r:.300}: must be a plain relative path without .., of short names")
        above = [str(folder) for folder in PurePosixPath(name).parents if str(folder) in own]
        if above:
            raise ValueError(f"files {above[0]!r:.300} and {name!r:.300}: the first can't be a folder too")


def _placed(agents: Mapping[str, bytes], own: Mapping[str, bytes]) -> dict[str, str]:
    """Path -> base64. Where both have a name, at its place or above it, the agent's is left out."""
    taken = {name.partition("/")[0] for name in own}
    files = {f"agent/{name}": data for name, data in agents.items() if name.partition("/")[0] not in taken}
    files |= {f"tests/{name}": data for name, data in own.items()}
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def _fault(test: Call | InProcess, done: ExecResult, nonce: str) -> tuple[Fault | None, str]:
    """What the runner's two lines say."""
    if done.limit is not None:
        return (Fault.TIME if done.timed_out else Fault.LIMIT), f"{done.limit}"
    lines = done.output.splitlines()
    if done.truncated or done.exit_code != 0 or len(lines) != 2 or lines[0] != f"{nonce} begin":
        return Fault.FORGED, f"exit code {done.exit_code}: {done.output[:200].replace(nonce, '')!r}"
    mark, _, text = lines[1].partition(" ")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if mark != nonce or not isinstance(said, dict) or len(said) != 1:
        return Fault.FORGED, f"{lines[1][:200].replace(nonce, '')!r}"
    if "value" not in said:
        return Fault.ERROR, f"{said.get('error')!s:.200}"
    expected = test.expected if isinstance(test, Call) else None
    return (None, "") if same(said["value"], expected) else (Fault.WRONG, f"it gives {text:.200}")


def _program_fault(test: Program, done: ExecResult) -> tuple[Fault | None, str]:
    if done.limit is not None:
        return (Fault.TIME if done.timed_out else Fault.LIMIT), f"{done.limit}"
    if done.exit_code != 0:
        return Fault.ERROR, f"exit code {done.exit_code}"
    right = not done.truncated and done.output.rstrip() == test.expected.rstrip()
    return (None, "") if right else (Fault.WRONG, f"it prints {done.output[:200]!r}")


@cache
def _runner() -> str:
    return Path(runner.__file__).read_text(encoding="utf-8")
