"""The sandbox of tasks whose agents send shell commands and nothing else, for stand-ins that know a few commands."""

from __future__ import annotations

from workers.sandbox.file_requests import FileRequest
from workers.sandbox.protocol import ExecResult, SandboxSession, ServerCall


class CommandsOnly(SandboxSession):
    """A session whose `exec` is a subclass's; all else raises, but for `close`: there is nothing to end."""

    async def python(self, code: str, *, timeout_s: float) -> ExecResult:
        raise NotImplementedError(f"it has no Python for {code!r}")

    async def file(self, request: FileRequest) -> ExecResult:
        raise NotImplementedError(f"it has no file tool for {request}")

    async def call(self, call: ServerCall) -> tuple[dict[str, object], bytes]:
        raise NotImplementedError(f"it has no command server for {call.name}")

    async def close(self) -> None:
        pass
